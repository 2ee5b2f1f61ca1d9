"""``silofl import --propose`` for pictures and scans: an inventory, a recipe with reasons, and questions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from partitions.common.errors import DataError, Problems
from partitions.common.output import text_page
from partitions.importing.discovery import find_others, find_rows, slice_volumes
from partitions.importing.files import Faults
from partitions.importing.options import ImportOptions
from partitions.importing.proposal.inventory import Inventory, inventory_lines, take_inventory
from partitions.importing.proposal.roles import Roles, SourceLayout, find_layout, find_roles
from partitions.importing.readers.reader import ImageInfo
from partitions.importing.readers.registry import probe_sample
from partitions.importing.streams import count_notes, draft_pictures, form_of
from partitions.importing.table_source import Listing, read_csv
from partitions.recipes.draft import without_cells
from partitions.recipes.pictures import PictureRecipe, made_by

SIDE = 224  # pixels; proposed where pictures have several sizes
SAMPLES = ("pictures", "NIfTI volumes", "DICOM pictures", "signals")  # kinds of files
LARGE = 1024  # pixels of a side from which a draft states the cost
ABOUT = """\
How silofl makes a data file of these pictures or scans. Correct what is wrong, then use it:
silofl import {{ layout.source }}{{ " --labels-from %s"|format(labels_from) if labels_from }} \
--recipe THIS.toml --out FILE.npz

What was found: {{ layout }}.
{% for line in found %}
  {{ line }}
{% endfor %}
{% for note in notes %}
  note: {{ note }}
{% endfor %}
{% if faults and layout.kind != "list" %}
  File 17 of a folder is: find FOLDER -xtype f | LC_ALL=C sort | sed -n 17p
{% endif %}
{% if questions %}

QUESTIONS. Answer each below, then delete its name from `questions`: until then nothing is imported.
{% for name, text in questions.items() %}
  {{ name }}: {{ text }}
{% endfor %}
{% endif %}"""
REASONS = """seed: of the split
window: as asked for: centre and width in the scans' own units
spacing: mm of a pixel, as asked for
slices: of each series or volume, as asked for
series: part of a series' description, as asked for
outlines: the classes 1, 2, ..., as asked for
planes: as the headers say; volumes of NIfTI are turned to axial slices
photometric: others are converted, with a note
rescaled: whether values are in a unit, such as Hounsfield
pixel-mm: half of the smallest to twice the largest pixel
slice-mm: from slice to slice, with the same room
channels: found by name in each file; their names leave your hospital with a model
rate: Hz; what has another rate is resampled
seconds: as asked for: what is longer is cut, behind what is shorter zeros follow
formats: what the files are
rates: Hz of the files
units: of each channel; volts become mV"""  # of each key of a recipe


def propose_pictures(source: Path, options: ImportOptions) -> str:
    """Return the draft as TOML. Raises DataError or UserError, one line, where nothing can be proposed."""
    layout = find_layout(source, options)
    inventory = take_inventory(layout.files)
    if inventory.kinds.keys().isdisjoint(SAMPLES):
        raise DataError(
            f"{source} has no pictures, scans or signals that can be read: {'; '.join(inventory_lines(inventory))}"
        )
    roles = find_roles(layout, options, inventory)
    infos, notes = infos_of(layout, options, inventory, known="label" not in roles.questions)
    if not infos:
        raise DataError(
            f"{source} gives no sample: {'; '.join([*inventory_lines(inventory), *notes])}"
        )
    draft = as_signals if any(info.rate for info in infos) else as_recipe
    recipe = draft(options, infos, roles)
    ask_of_scans(options, inventory, infos, roles)
    return write_draft(layout, options, inventory, recipe, roles, [*notes, *count_notes(infos)])


def infos_of(
    layout: SourceLayout, options: ImportOptions, inventory: Inventory, known: bool
) -> tuple[list[ImageInfo], list[str]]:
    """Return the image infos of the samples in an import, and notes; faults are added to the inventory.

    ``known``: whether labels are known, so that samples without one are left out.
    """
    changed = replace(options, faults=Faults(skip=True), problems=Problems())
    try:
        rows = samples_of(layout, changed, known)
        changed.problems.refuse(layout.source)
    except DataError as error:
        return [], [f"the import would say: {error}"]
    infos, notes = list[ImageInfo](), list(rows.notes)
    for sample in tqdm(rows.rows, desc="samples", unit=""):
        try:
            infos.append(probe_sample(sample, options.reading))
        except DataError as error:
            if sample.where not in inventory.places:
                inventory.fault(error, sample.where)
    notes += [
        f"does not fit: {text}"
        for text in changed.faults.messages
        if not text.startswith(inventory.places)
    ]
    rest = "until the files that do not fit are out, [expected] is of all others"
    return infos, notes + [rest] * bool(inventory.faults)


def samples_of(layout: SourceLayout, options: ImportOptions, known: bool) -> Listing:
    """Return the samples of a source, with or without their labels. Raises DataError."""
    take = replace(options.take, patient=options.take.patient or None)
    changed = replace(options, take=take, subgroup="")
    if known:
        return find_rows(layout.source, changed)
    blank = PictureRecipe(pictures=made_by((1, 1, 1), "uint8", options.reading))
    blanked = replace(changed, pictures=blank)
    if layout.kind == "list":
        return slice_volumes(read_csv(layout.source, blanked), changed)
    return find_others(layout.source, blank, blanked, labelled=False)


def as_recipe(
    options: ImportOptions, infos: Sequence[ImageInfo], roles: Roles
) -> PictureRecipe:
    """Return the draft of the recipe, with reasons for the conversion and the expected properties."""
    reading = options.reading
    sizes = Counter((info.height, info.width) for info in infos)
    (height, width), _ = sizes.most_common(1)[0]
    if len(sizes) > 1:
        height = width = SIDE
        reading = replace(reading, size=SIDE)
        low, high = min(sizes), max(sizes)
        roles.questions["shape"] = (
            f"the pictures have {len(sizes)} sizes, from {low[1]} x {low[0]} to {high[1]} x {high[0]}; which one do "
            f"all hospitals take? {SIDE} x {SIDE} is a draft: change shape, or run --propose again with --size"
        )
    shape, dtype = form_of(infos, height, width)
    recipe = draft_pictures(infos, shape, dtype, reading, **roles.fields, seed=options.seed)
    deep = sum(info.deep for info in infos)
    if 0 < deep < len(infos) and all(info.acquired.format == "picture" for info in infos):
        roles.questions["dtype"] = (
            f"{deep} of {len(infos)} pictures have 16 bits, the others 8: convert them alike"
        )
    roles.reasons |= reasons_of(recipe, infos, options, len(sizes))
    return recipe


def as_signals(
    options: ImportOptions, infos: Sequence[ImageInfo], roles: Roles
) -> PictureRecipe:
    """Return the draft of a recipe of signals, with reasons, and questions where they differ."""
    signals = [info for info in infos if info.rate]
    forms = Counter((info.acquired.channels, info.rate, info.height) for info in signals)
    channels, rate, steps = forms.most_common(1)[0][0]
    each = ((frozenset(names), hertz, length / hertz) for names, hertz, length in forms)
    for name, values in zip(
        ("channels", "rate", "seconds"), zip(*each, strict=True), strict=True
    ):
        if (count := len(set(values))) > 1:
            roles.questions[name] = (
                f"the signals have {count} different {name}; which ones do all hospitals take? The most frequent is a "
                f"draft: run --propose again with --{name}"
            )
    if len(signals) < len(infos):
        roles.questions["kind"] = (
            f"{len(infos) - len(signals)} of {len(infos)} samples are pictures: import them one by one"
        )
    same = [info for info in signals if info.acquired.channels == channels]
    same.sort(key=lambda info: info.rate != rate)
    shape = steps, len(channels)
    size = 4e-6 * math.prod(shape) * len(infos)
    roles.reasons["shape"] = f"steps and channels; {size:.3g} MB in all"
    fields = roles.fields | {"seed": options.seed}
    return draft_pictures(same, shape, "float32", options.reading, **fields)


def reasons_of(
    recipe: PictureRecipe, infos: Sequence[ImageInfo], options: ImportOptions, sizes: int
) -> dict[str, str]:
    """Return the reason for each entry."""
    result = recipe.pictures
    *depth, height, width, channels = result.shape
    size = math.prod(result.shape) * np.dtype(result.dtype).itemsize
    how = "of several sizes" if sizes > 1 else "as they all are"
    how = "as asked for" if options.size or depth else how
    order = "depth, " * len(depth) + f"height, width, channels: {how}"
    shape = f"{order}; {size / 1e6:.3g} MB each, {size * len(infos) / 1e9:.3g} GB in all"
    if not depth and max(height, width) > LARGE:
        shape += f"\nlarge for a network: resize = true and shape = [{SIDE}, {SIDE}, {channels}] makes them smaller"
    if colour := sum(info.channels == 3 for info in infos):
        shape += f"\n{colour} of {len(infos)} are in colour"
    reasons = {
        "shape": shape,
        "dtype": "more than 8 bits become 0..1"
        if result.dtype == "float32"
        else "all have 8 bits",
        "resize": "stretched to the shape"
        if result.spacing is None
        else "cut or widened to the shape",
        "modalities": f"of the {len(infos)} samples; a model of one modality is of no use for another",
    }
    if not recipe.expected.pixel:
        reasons["formats"] = "what the files are; not all say how large a pixel is"
    return reasons


def ask_of_scans(
    options: ImportOptions, inventory: Inventory, infos: Sequence[ImageInfo], roles: Roles
) -> None:
    """Add questions on differences between scans."""
    modalities = Counter(
        info.acquired.modality or "none" for info in infos if info.acquired.format == "dicom"
    )
    if len(modalities) > 1:
        each = ", ".join(f"{count} {name}" for name, count in modalities.most_common())
        roles.questions["modalities"] = (
            f"samples are of {each}: choose one series with --series, or keep those you mean"
        )
    rescaled = any(info.acquired.rescaled for info in infos)
    if "CT" in modalities and not options.window and rescaled:
        roles.questions["window"] = (
            "which Hounsfield units are to be seen? Run --propose again with --window=CENTRE,WIDTH, for example "
            "--window=40,400 for soft tissue. Without one each file's own window counts, and hospitals differ in it"
        )
    if inventory.slices > 1 and options.slices == 1 and not options.volume:
        roles.questions["slices"] = (
            "of a series or volume of several slices the middle one is taken. Is that meant? slices = 5 under "
            "[pictures] takes the middles of five parts; --volume D,H,W takes whole volumes"
        )


def write_draft(
    layout: SourceLayout,
    options: ImportOptions,
    inventory: Inventory,
    recipe: PictureRecipe,
    roles: Roles,
    notes: Sequence[str],
) -> str:
    """Return the draft as TOML."""
    about = text_page(
        ABOUT,
        layout=layout,
        labels_from=options.labels_from,
        found=inventory_lines(inventory),
        notes=notes,
        faults=inventory.faults,
        questions=roles.questions,
    )
    draft = recipe.model_copy(update={"questions": tuple(roles.questions)})
    known = dict(line.split(": ", 1) for line in REASONS.splitlines())
    return without_cells(draft.toml(about.rstrip("\n"), known | roles.reasons), layout.lines)
