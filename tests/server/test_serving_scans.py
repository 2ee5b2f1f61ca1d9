"""``silofl predict --serve`` for pictures and scans: the answers of a folder, and what is refused; nothing stays."""

from __future__ import annotations

import asyncio
import io
import tempfile
import zipfile
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image
from predictions import read_rows
from scans import leaks, study_uid, write_dicom, write_nifti
from taken import silofl

from client.export import read_model
from client.prediction.new_samples import recipe_of
from client.prediction.predict import predict_file
from partitions.recipes.pictures import PictureRecipe, parse_any
from server import serving
from server.cli.main import main
from server.serving import prediction_app

DICOM, ZIP = {"content-type": "application/dicom"}, {"content-type": "application/zip"}


def study(root, i, **attributes):
    """A CT of three slices; odd ones are bright."""
    for k in range(3):
        place = {
            "ImageOrientationPatient": [1, 0, 0, 0, 1, 0],
            "ImagePositionPatient": [0, 0, k],
            **attributes,
        }
        pixels = np.full((4, 4), 3000 if i % 2 else 500 + i, np.uint16)
        write_dicom(
            root / f"{i}-{k}",
            pixels,
            patient=f"P-{i}",
            study=i,
            number=k,
            PixelSpacing=[1, 1],
            **place,
        )
    return root


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    rows = (f"{study_uid(i)},{'ill' if i % 2 else 'well'}\n" for i in range(12))
    (folder / "l.csv").write_text("study,label\n" + "".join(rows))
    for i in range(12):
        study(folder / "x", i)
    data, run, out = folder / "a.npz", folder / "run", folder / "m.safetensors"
    labels = ["--labels-from", str(folder / "l.csv"), "--window=2000,4000"]
    assert silofl("import", folder / "x", *labels, "--out", data) == 0
    settings = ["model=mlp", "mlp.hidden=", "learning-rate=0.5", "threads=1", "batch-size=8"]
    options = [*f"--partition iid --silos 2 --rounds 1 --out {run} --set".split(), *settings]
    assert silofl(*f"simulate --data {data} --strategy fedavg".split(), *options) == 0
    assert main(f"export {run} --silo hospital-01 --which last --out {out}".split()) == 0
    return out


@pytest.fixture(autouse=True)
def temporary(tmp_path, monkeypatch):
    """Where requests lie: empty after each test."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert list(folder.iterdir()) == []


def ask(model, body, path="/predict", recipe=None, **headers):
    card, net = read_model(model)
    used = recipe or recipe_of(card)

    async def go():
        transport = httpx.ASGITransport(prediction_app(card, net, used))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1:8643"
        ) as client:
            given = {k.replace("_", "-"): v for k, v in headers.items()}
            return await (
                client.get(path)
                if body is None
                else client.post(path, content=body, headers=given)
            )

    return asyncio.run(go())


def zipped(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


def below(folder):
    return {f"export/{path.name}": path.read_bytes() for path in sorted(folder.iterdir())}


def test_one_file_and_a_zip_get_the_answers_of_a_folder(tmp_path, model, capsys):
    new = study(study(tmp_path / "new", 51), 52)
    wanted = read_rows(predict_file(model, new))
    capsys.readouterr()
    answer = ask(model, zipped({**below(new), "export/": b"", "__MACOSX/._a": b"x"}), **ZIP)
    found = [
        {k: v if isinstance(v, str) else f"{v:.6g}" for k, v in row.items()}
        for row in answer.json()["rows"]
    ]
    assert (
        answer.status_code == 200
        and found == wanted
        and [row["patient"] for row in found] == ["P-51", "P-52"]
    )
    assert answer.headers["cache-control"] == "no-store"
    assert any(
        "have several slices: the middle one is taken" in note
        for note in answer.json()["notes"]
    )
    one = ask(model, (new / "51-1").read_bytes(), "/predict?key=study", **DICOM).json()["rows"]
    assert one[0]["study"] == study_uid(51) and f"{one[0]['p_ill']:.6g}" == wanted[0]["p_ill"]
    assert capsys.readouterr() == ("", "")


def test_it_says_what_it_takes(model):
    about = ask(model, None, "/").json()
    assert about["expected"]["modalities"] == ["CT"] and about["pictures"]["shape"] == [4, 4, 1]
    assert about["limits"]["bytes"] == serving.MOST_SCAN_BYTES


def test_names_in_a_zip_lead_nowhere(tmp_path, model):
    """Paths out of the folder, absolute ones, one name twice, and a link are contents like others."""
    new = study(tmp_path / "new", 61)
    one, two, three = (path.read_bytes() for path in sorted(new.iterdir()))
    with pytest.warns(UserWarning, match="Duplicate name"):
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as archive:
            archive.writestr("../../outside", one)
            archive.writestr("/tmp/outside-of-silofl", two)
            archive.writestr("../../outside", three)
            link = zipfile.ZipInfo("link.dcm")
            link.external_attr = 0o120777 << 16
            archive.writestr(link, "/etc/passwd")
    answer = ask(model, out.getvalue(), **ZIP)
    assert answer.status_code == 200 and [row["patient"] for row in answer.json()["rows"]] == [
        "P-61"
    ]
    assert not list(tmp_path.rglob("outside*")) and not Path("/tmp/outside-of-silofl").exists()
    assert (
        answer.json()["notes"][0]
        == "1 of 4 files hold no DICOM picture: passed over (1 without an ending)"
    )


def png(size=(4, 4)):
    out = io.BytesIO()
    Image.new("L", size).save(out, "PNG")
    return out.getvalue()


def broken(content):
    """A zip whose first member's bytes are changed."""
    made = bytearray(zipped({"a": content}))
    made[34] ^= 255
    return bytes(made)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "its format is picture, where"),
        (b"junk" * 100, "cannot be read (it is no picture)"),
        (png(), "its format is picture, where the recipe has dicom"),
        (png()[:50], "its format is picture, where"),
        (b"\x1f\x8b" + b"x" * 400, "its file cannot be read as NIfTI"),
        (b"PK\x03\x04junk", "the request's zip cannot be read (BadZipFile)"),
        (broken(b"a" * 1000), "the request's zip cannot be read"),
        (zipped({}), "has 0 files; 1 to 10000"),
        (lambda: zipped({f"{i}": b"" for i in range(10_001)}), "has 10001 files; 1 to 10000"),
        (lambda: zipped({"a": b"\0" * (1 << 28)}), "would unpack to"),
        (zipped({"a.png": png()}), "its format is picture, where the recipe has dicom"),
        (zipped({"a.zip": zipped({"a": b"b"})}), "the request has no pictures"),
    ],
    ids=str.split("empty junk png cut gzip nozip crc nothing many bomb other nested"),
)
def test_what_does_not_fit_is_refused(model, body, words, capsys, temporary):
    """In one line without a path, and not a word of it in the log."""
    # What takes a second to make is made where it is asked
    body = body() if callable(body) else body
    answer = ask(model, body, content_type="application/octet-stream")
    said = answer.json()["error"]
    assert answer.status_code == 422 and (words in said or not body)
    assert "\n" not in said and str(temporary) not in said and leaks(said) == []
    assert capsys.readouterr() == ("", "")


def test_another_modality_and_a_broken_series(tmp_path, model):
    new = study(tmp_path / "new", 71, Modality="MR")
    said = ask(model, zipped(below(new)), **ZIP).json()["error"]
    assert said.startswith(
        "1 of 1 pictures do not fit the recipe: the request, file 2 of 3: its modality is MR"
    )
    assert leaks(said) == []
    assert (
        "unknown key 'file'"
        in ask(model, zipped(below(new)), "/predict?key=file", **ZIP).json()["error"]
    )


def test_volumes(tmp_path, model):
    """A zip of one series and a NIfTI file are volumes; a gap between slices is refused, as in a folder."""
    card = read_model(model)[0]
    content = {**(card.recipe or {}), "expected": {}}
    content["pictures"] = {
        "shape": [4, 2, 2, 1],
        "dtype": "float32",
        "window": [2000.0, 4000.0],
    }
    recipe = parse_any(content)
    assert isinstance(recipe, PictureRecipe)
    new = study(tmp_path / "new", 81)
    said = ask(model, zipped(below(new)), recipe=recipe, **ZIP).json()
    # Read as a volume; the model takes slices
    assert "samples of shape (1, 4, 2, 2)" in said["error"]
    write_nifti(tmp_path / "v.nii.gz", np.full((4, 4, 4), 900, np.int16))
    for name, kind in (("v.nii.gz", "application/gzip"), ("v.nii", "application/octet-stream")):
        write_nifti(tmp_path / name, np.full((4, 4, 4), 900, np.int16))
        said = ask(
            model, (tmp_path / name).read_bytes(), recipe=recipe, content_type=kind
        ).json()
        assert "samples of shape (1, 4, 2, 2)" in said["error"]
    (new / "81-1").unlink()
    write_dicom(new / "81-9", np.zeros((4, 4), np.uint16), patient="P-81", study=81, number=9, PixelSpacing=[1, 1],
                ImageOrientationPatient=[1, 0, 0, 0, 1, 0], ImagePositionPatient=[0, 0, 9])  # fmt: skip
    assert (
        "mm apart, others"
        in ask(model, zipped(below(new)), recipe=recipe, **ZIP).json()["error"]
    )


def test_a_long_body_is_refused(model, monkeypatch):
    monkeypatch.setattr(serving, "MOST_SCAN_BYTES", 100)
    assert ask(model, b" " * 101, **DICOM).status_code == 413


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": "multipart/form-data"}, 415),
        ({}, 415),
        ({**DICOM, "host": "evil.example"}, 403),
        ({**DICOM, "origin": "http://evil.example"}, 403),
    ],
)
def test_pages_of_other_sites_get_nothing(model, headers, status):
    assert ask(model, b"x", **headers).status_code == status


def test_a_fault_leaves_nothing(model, monkeypatch, capsys):
    def fails(*_):
        raise RuntimeError("/secret/path")

    monkeypatch.setattr(serving, "predict_scans", fails)
    answer = ask(model, b"x", **DICOM)
    assert answer.status_code == 500 and "secret" not in answer.text
    assert capsys.readouterr().err == "a fault of silofl: RuntimeError; please report it\n"
