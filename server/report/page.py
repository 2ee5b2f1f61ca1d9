"""The report's page, section by section. Everything that comes from a run (names, messages, settings) is escaped."""

# ruff: noqa: E501
from __future__ import annotations

import math
import re
import shlex
import time
from collections.abc import Sequence
from html import escape as e
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import matplotlib

from server.report import charts
from server.report.charts import size_text, typical
from server.report.html import (
    CSS,
    between,
    both_widths,
    cells,
    duration,
    number,
    percent,
    points,
    silos_of,
    spoken,
    table,
    with_spread,
)
from server.report.study import Gain, Study, alone, baselines, exchanges, reports, spelled
from strategies import strategies
from strategies.base.run_settings import defaults

SMALL = 30  # a test set of fewer samples is called small


def page(study: Study) -> str:
    """The whole report of a study."""
    with matplotlib.rc_context(charts.SETTINGS):
        parts = [
            ("silos", "Silos", silos_section(study)),
            ("methods", "Methods", methods_section(study)),
            ("rounds", "Rounds", rounds_section(study)),
            ("data", "Data", data_section(study)),
            ("relationships", "Relationships", relationships_section(study)),
            ("cost", "Cost", cost_section(study)),
            ("left", "What left the silos", left_section(study)),
            ("repeat", "Repeat", repeat_section(study)),
        ]
    parts = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{key}">{name}</a>' for key, name, _ in parts)
    sections = "\n".join(f'<section id="{key}">{body}</section>' for key, _, body in parts)
    sentence, lead = headline(study)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{e(title(study))}</title>
<style>{CSS}</style>
</head>
<body>
<main>
<header>
<p class="where">{where(study)}</p>
<h1>{sentence}</h1>
<p class="lead">{lead}</p>
{faults(study)}
{tiles(study)}
<nav>{links}</nav>
</header>
{sections}
<footer>{footer(study)}</footer>
</main>
</body>
</html>
"""


# ---------------------------------------------------------------------------------------------------------------------
# The head of the page


def title(study: Study) -> str:
    return f"silofl report: {study.path.resolve().name}"


def where(study: Study) -> str:
    c = study.config
    bits = [f"<b>{e(study.path.resolve().name)}</b>"]
    if study.manifest or study.simulated:
        dataset = str((study.manifest or c).get("dataset", ""))
        bits.append(f"{e(Path(dataset).name)}, {e(str((study.manifest or c).get('partition', '')))}")
    if study.silos:
        bits.append(silos_of(len(study.silos)))
    seeds = f"seed {study.seeds[0]}" if len(study.seeds) == 1 else f"{len(study.seeds)} seeds"
    bits += [seeds] if study.seeds else []
    file = next((f for f in ("summary.json", "history.csv", "config.toml") if (study.path / f).exists()), "")
    bits.append(time.strftime("%-d %B %Y", time.localtime((study.path / file).stat().st_mtime)))
    return " · ".join(bits)


def headline(study: Study) -> tuple[str, str]:
    """The sentence at the top, and the one below it that says how far to trust it."""
    if not study.runs:
        return (
            "The run failed" if study.faults else "There are no results yet"
        ), f"No silo has reported {a_score(study)}."
    best, base = study.best, study.base
    known = [s for s in study.silos if any(not math.isnan(study.score(m, s).mean) for m in study.methods)]
    if not known:
        return f"The {scores(study)} stayed in the silos", (
            "Every silo's test set is too small for its metrics to be sent. They are in the silos' own logs."
        )
    method = best or study.methods[0]
    bytes_, seconds = study.cost(method)
    price = f"at a cost of {size_text(bytes_)} and {spoken(seconds)}"
    price = re.sub(r"(\d) ", "\\1&nbsp;", price)
    if base is None:
        mean, _ = study.final(method, mean_of(study))
        how = e(spelled(method)) if exchanges(method) else "Training alone"
        add = f"<code>{alone()}</code>" if exchanges(method) else "a method that shares something"
        return (
            f"{how} reaches {percent(mean)}&#8239;% mean {study.task.word} over {silos_of(len(known))}, {price}",
            f"What a silo gains is not known: run {add} in the same study to compare.",
        )
    assert best is not None
    up, level, down = study.counts(best, base)
    total = up + level + down
    mean_gain = study.mean_gain(best, base)
    over = strategies()[base].baseline
    if total == 0:
        return (
            f"{e(spelled(best))} cannot be compared with {over}",
            f"No silo has reported {a_score(study)} for both.",
        )
    gain_word = "gains" if up == 1 else "gain"
    sentence = (
        f"<em>{up} of {silos_of(total)}</em> {gain_word} with {e(spelled(best))}: on average "
        f"<em>{points(mean_gain.mean)} points</em> of {study.task.word} over {over}, {price}"
    )
    return sentence, caution(study, best, base)


def caution(study: Study, best: str, base: str) -> str:
    """How far the headline can be trusted, in plain words."""
    gains = {s: study.gain(best, base, s) for s in study.silos}
    tested = [s for s, g in gains.items() if not math.isnan(g.mean)]
    sizes = sorted({n for s in tested for n in study.sizes(s, "n_test")} - {0})
    mean_gain = study.mean_gain(best, base)
    certain = sum(study.gain(best, base, s).certain and study.gain(best, base, s).sign > 0 for s in study.silos)
    text = []
    if sizes:
        many = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        text.append(f"Each silo is tested on its own {many} samples, which leaves a single silo's gain uncertain")
        alone = "no gain is" if certain == 0 else ("one gain is" if certain == 1 else f"{certain} gains are")
        text[-1] += f": {alone} larger than chance alone could explain."
    low, high = mean_gain.interval
    if not math.isnan(low):
        sure = "clear of zero" if low > 0 or high < 0 else "not clear of zero"
        text.append(f"The average over all silos is {sure} (95&#8239;% interval {between(mean_gain)}).")
    worst, alone_worst = (study.final(m, f"{study.task.score}_worst")[0] for m in (best, base))
    if not math.isnan(worst) and not math.isnan(alone_worst):
        over = f"{percent(alone_worst)}&#8239;% with {e(spelled(base))}"
        text.append(f"The worst silo reaches {percent(worst)}&#8239;% ({over}).")
    if missing := len(study.silos) - len(tested):
        text.append(f"{silos_of(missing)} sent no {study.task.word} and {'is' if missing == 1 else 'are'} not counted.")
    if study.chosen_on == "test" and len(study.methods) > 2:
        text.append("There are no validation data, so the method was chosen on the test data that it is judged by.")
    return " ".join(text)


def faults(study: Study) -> str:
    lines = [f"<p>{e(f)}.</p>" for f in (*study.faults, *study.notes)]
    return f'<div class="fault">{"".join(lines)}</div>' if lines else ""


def tiles(study: Study) -> str:
    if not study.runs:
        return ""
    found: list[tuple[str, str, str]] = []
    method, base = study.best or study.methods[0], study.base
    if base and study.best:
        up, level, down = study.counts(study.best, base)
        found.append(
            (
                "Silos that gain",
                f"{up}<small> of {up + level + down}</small>",
                f"{level} level, {down} {'loses' if down == 1 else 'lose'}",
            )
        )
        total = study.mean_gain(study.best, base)
        interval = between(total)
        found.append(
            (
                "Mean gain",
                f"{points(total.mean)}<small> points</small>",
                f"95&#8239;% interval {interval}" if interval else "one silo: no interval",
            )
        )
    others = [m for m in study.columns if m != method]
    mean, deviation = study.final(method, mean_of(study))
    rest = " · ".join(f"{e(spelled(m))} {percent(study.final(m, mean_of(study))[0])}" for m in others)
    if not math.isnan(deviation):
        rest = f"± {percent(deviation)} over seeds" + (f" · {rest}" if rest else "")
    found.append(
        (
            f"Mean {study.task.word}, {e(spelled(method))}",
            f"{percent(mean)}<small>&#8239;%</small>",
            rest or "over silos, each counting alike",
        )
    )
    bytes_, seconds = study.cost(method)
    found.append(
        (
            "Cost of one run",
            f"{size_text(bytes_).replace(' ', '<small> ')}</small>",
            f"sent and received, in {duration(seconds)}",
        )
    )
    inner = "".join(f"<div><dt>{t}</dt><dd>{v}</dd><dd>{s}</dd></div>" for t, v, s in found)
    return (
        f'<dl class="tiles" style="grid-template-columns: repeat({len(found)}, 1fr)">{inner}</dl>'
        if len(found) < 4
        else f'<dl class="tiles">{inner}</dl>'
    )


# ---------------------------------------------------------------------------------------------------------------------
# Sections


def silos_section(study: Study) -> str:
    if not study.runs:
        return ""
    best, base, methods = study.best or study.methods[0], study.base, study.columns
    several = len(study.seeds) > 1
    rows = []
    for silo in study.silos:
        n_test = study.sizes(silo, "n_test")
        train, test = span(study.sizes(silo, "n_train")), span(n_test)
        small = "<small>small</small>" if n_test and 0 < n_test[0] < SMALL else ""
        row = (
            f'<th scope="row">{e(silo)}<small class="phone">{train} + {test}</small></th>'
            f'<td class="desk">{train}</td><td class="desk">{test}{small}</td>'
        )
        for method in methods:
            cell = study.score(method, silo)
            low, high = cell.interval
            if math.isnan(cell.mean):
                text = "<small>withheld</small>" if silo in study.withheld else "–"
            else:
                text = percent(cell.mean)
                text += "" if math.isnan(low) else f"<small>{percent(low, 0)}–{percent(high, 0)}</small>"
                text += "" if math.isnan(cell.spread) else f"<small>±&#8202;{percent(cell.spread)}</small>"
            row += f'<td class="{"main" if method == best and len(methods) > 1 else ""}">{text}</td>'
        if base:
            row += gain_cell(study.gain(best, base, silo))
        rows.append(row)
    head = ['Silo<small class="phone">train + test</small>', "Train", "Test", *(e(spelled(m)) for m in methods)]
    foot = '<th scope="row">Mean</th><td class="desk"></td><td class="desk"></td>'
    foot += cells(percent(study.final(m, mean_of(study))[0]) for m in methods)
    if base:
        head.append(f"Gain of {e(spelled(best))}<br>over {e(spelled(base))}")
        foot += f"<td>{points(study.mean_gain(best, base).mean)}</td>"
    known = any(not math.isnan(study.score(m, s).mean) for m in methods for s in study.silos)
    figure = both_widths(charts.gains(study, 820), charts.gains(study, 350)) if known else ""
    wilson = "Wilson's" if study.task.score == "accuracy" else "its"
    what = "mean and standard deviation over seeds" if several else f"with {wilson} 95&#8239;% interval below"
    about = f"{capital(study)} in per cent on the silo's own test samples, {what}. "
    if base:
        about += (
            "The gain's interval is a paired bootstrap over seeds."
            if several
            else "The gain's interval (Newcombe) takes the two tests as independent, because which samples were right "
            "never leaves a silo; it is wider than it need be."
        )
    held = ""
    if study.withheld:
        held = (
            f'<p class="note">Withheld by the silo because too few test samples stand behind them: '
            f"{e(', '.join(study.withheld))}.</p>"
        )
    return (
        f"<h2>What each silo gained</h2><p class='lead'>{losers(study)}</p>"
        f"<figure>{figure}</figure>{table(head, rows, foot, 'silos')}<p class='note' style='margin-top:12px'>{about}</p>"
        f"{held}{absences(study)}"
    )


def mean_of(study: Study) -> str:
    """The key of a run's mean score."""
    return f"{study.task.score}_mean"


def capital(study: Study) -> str:
    return study.task.word[0].upper() + study.task.word[1:]


def a_score(study: Study) -> str:
    return f"{'a' if study.task.word.startswith(('C', 'D')) else 'an'} {study.task.word}"


def scores(study: Study) -> str:
    return "accuracies" if study.task.word == "accuracy" else f"{study.task.word} values"


def shown_as(metric: str) -> str:
    """How a metric is written: per cent, or a number of digits."""
    return {"auc": "3", "kappa": "3", "mae": "3", "rmse": "3"}.get(metric, "%")


COMPANIONS = {
    "multiclass": "Accuracy's companions that do not let common classes hide rare ones; mean over silos.",
    "ordinal": "How many grades a prediction is off on average, and Cohen's κ with squared distances; mean over silos.",
    "multilabel": "At a probability of one half, mean over findings and silos. Of rare findings, always saying no is very accurate.",
    "regression": "Mean absolute error and root of the mean squared one, in the labels' own units; mean over silos.",
}


def companions(study: Study) -> list[tuple[str, str]]:
    """What stands beside the score."""
    return [(", ".join(study.task.beside.values()), COMPANIONS[study.task.name])] if study.task.beside else []


def span(values: Sequence[int]) -> str:
    """``40``, or ``28–50`` where seeds differ."""
    return "–" if not values else f"{values[0]}" if len(values) == 1 else f"{values[0]}–{values[-1]}"


def gain_cell(gain: Gain) -> str:
    kind = {1: "up", 0: "", -1: "down"}[gain.sign]
    interval = between(gain, 0)
    return f'<td class="{kind}">{points(gain.mean)}' + (f"<small>{interval}</small>" if interval else "") + "</td>"


def losers(study: Study) -> str:
    best, base = study.best, study.base
    if not best or not base:
        return f"The {study.task.word} of every silo's model on the silo's own test data."
    gains = {s: study.gain(best, base, s) for s in study.silos}
    lose = [f'<span class="nb">{e(s)} ({points(g.mean)})</span>' for s, g in gains.items() if g.sign < 0]
    other = (
        ""
        if study.personalised in (None, best)
        else (f" The best personalised method was {e(spelled(study.personalised))}.")
    )
    if not lose:
        return f"No silo does worse with {e(spelled(best))} than with {e(spelled(base))}.{other}"
    if len(lose) > 6:
        lose = [*lose[:5], f"{len(lose) - 5} others"]
    return f"Worse off with {e(spelled(best))} than with {e(spelled(base))}: {', '.join(lose)}.{other}"


def absences(study: Study) -> str:
    """Who was left out of rounds, and whose step counted in part only (the setting ``robust``)."""
    return named("Rounds that went on without a silo", study.absences) + named(
        "Rounds in which a silo's step was bounded", study.bounds
    )


def named(title: str, found: Sequence[tuple[str, int, str, int, str]]) -> str:
    if not found:
        return ""
    rows = [
        f'<th scope="row">{e(silo)}</th><td>{e(spelled(method))}, {seed}</td><td>{n}</td><td class="text">{e(reason)}</td>'
        for method, seed, silo, n, reason in found
    ]
    return f"<h3>{e(title)}</h3>" + table(["Silo", "Method, seed", "Rounds", "Last reason"], rows, kind="reasons")


def methods_section(study: Study) -> str:
    if not study.runs:
        return ""
    several = len(study.seeds) > 1
    ranks = study.ranks
    rows = []
    for m in study.methods:
        fairness = study.final(m, "fairness_variance")
        rate = (math.nan, math.nan) if m in baselines() else study.final(m, "incentivized_rate")
        final_round, best_round = rounds_text(study, m, "final"), rounds_text(study, m, "bmcta")
        row = [
            with_spread(*study.final(m, mean_of(study)), "%") + final_round,
            with_spread(*study.final(m, f"{study.task.score}_weighted"), "%"),
            with_spread(*study.final(m, f"{study.task.score}_worst"), "%"),
            *(with_spread(*study.final(m, f"{metric}_mean"), shown_as(metric)) for metric in study.task.beside),
            with_spread(*fairness, "4"),
            "–" if math.isnan(rate[0]) else f"{100 * rate[0]:.0f}&#8239;%",
            number(ranks.get(m, math.nan), 2),
            with_spread(*study.final(m, "bmcta"), "%") + best_round,
        ]
        name = f'<th scope="row">{e(spelled(m))}<small>{e(m)}, {"model before" if reports(m) == "received" else "model after"} local training</small></th>'
        rows.append(name + cells(row))
    head = [
        "Method",
        "<b>Final</b><br>" + ("by validation" if study.chosen_on == "val" else "last round"),
        "weighted by<br>test samples",
        "Worst<br>silo",
        *study.task.beside.values(),
        "Fairness<br>variance",
        "Incentivised<br>rate",
        "Mean<br>rank",
        "<b>BMCTA</b><br>best on test",
    ]
    rule = "validation" if study.chosen_on == "val" else "test"
    terms = [
        (
            "Final",
            f"Mean over silos at the round where the mean {rule} {study.task.word} was best. This is the number to expect."
            if rule == "validation"
            else "Mean over silos at the last round, because no silo has validation data.",
        ),
        (
            "BMCTA",
            f"Best mean test {study.task.word} over all rounds: the statistic that papers report. It picks the round by looking at "
            "the test data, so it is never below what a user would get and usually above.",
        ),
        (
            "Fairness variance",
            f"How much {study.task.word} differs between silos. Smaller is more even; 0 means that every silo has the same.",
        ),
        (
            "Incentivised rate",
            "Share of silos that the method serves better than "
            f"{' and better than '.join(e(strategies()[b].baseline) for b in baselines())}. "
            "Below it are silos with no reason to take part.",
        ),
        (
            "Mean rank",
            "Place of the method among those of the study, averaged over silos; 1 would be first everywhere.",
        ),
        *companions(study),
    ]
    meanings = "".join(f"<dt>{k}</dt><dd>{v}</dd>" for k, v in terms)
    compare = ""
    others = [m for m in study.methods if m != study.base]
    if study.base and len(others) > 1:
        compare = (
            f"<figure>{both_widths(charts.compared(study, 820), charts.compared(study, 350))}<figcaption>Gain over "
            f"{e(spelled(study.base))}: mean over silos with its 95&#8239;% interval (paired bootstrap over "
            f"{'silos and seeds' if several else 'silos'}); each tick below is one silo.</figcaption></figure>"
        )
    seeds = (
        f" Means over {len(study.seeds)} seeds, ± standard deviation; each seed splits the data anew."
        if several
        else ""
    )
    return (
        f"<h2>How the methods compare</h2><p class='lead'>Each silo counts alike, however large it is.{seeds}</p>"
        f"{table(head, rows)}{compare}{every_method(study)}<dl class='terms'>{meanings}</dl>"
    )


def rounds_text(study: Study, method: str, which: str) -> str:
    found = [r["final"]["round"] if which == "final" else r["bmcta_round"] for r in study.of(method)]
    known = sorted({f for f in found if f is not None})
    if not known:
        return ""
    return f"<small>round {known[0]}</small>" if len(known) == 1 else f"<small>rounds {known[0]}–{known[-1]}</small>"


def every_method(study: Study) -> str:
    """Per silo all methods and their differences, where the first table shows only some of them."""
    if len(study.methods) <= len(study.columns) and len(study.methods) < 4:
        return ""
    rows = []
    for silo in study.silos:
        means = {m: study.score(m, silo) for m in study.methods}
        top = max((c.mean for c in means.values() if not math.isnan(c.mean)), default=math.nan)
        row = f'<th scope="row">{e(silo)}</th>'
        for m, cell in means.items():
            text = with_spread(cell.mean, cell.spread, "%")
            if study.base and m != study.base:
                text += f"<small>{points(study.gain(m, study.base, silo).mean)}</small>"
            row += f'<td class="{"best" if cell.mean >= top - 1e-9 else ""}">{text}</td>'
        rows.append(row)
    below = f", and the paired difference to {e(spelled(study.base))}" if study.base else ""
    return (
        f"<h3>All methods per silo</h3><p class='note'>Test {study.task.word} in per cent{below}; the best of each silo in bold.</p>"
        + table(["Silo", *(e(spelled(m)) for m in study.methods)], rows)
    )


def rounds_section(study: Study) -> str:
    methods = [m for m in study.methods if study.curve(m, reports(m))]
    if not methods:
        return ""
    shown = methods if len(methods) <= 6 else list(dict.fromkeys([*study.columns, *methods]))[:6]
    panels = "".join(f"<figure><h3>{e(spelled(m))}</h3>{charts.before_after(study, m)}</figure>" for m in shown)
    rest = (
        "" if len(shown) == len(methods) else f" Shown are {len(shown)} of {len(methods)} methods; history.csv has all."
    )
    return (
        f"<h2>{capital(study)} by round</h2><p class='lead'>How fast the silos' mean test {study.task.word} rises.</p>"
        f"<figure>{both_widths(charts.by_round(study, 820), charts.by_round(study, 350))}</figure>"
        "<h3>Before and after local training</h3>"
        "<p class='note'>In every round a silo tests the model it <b>received</b> (dashed, squares) and, after training on its "
        f"own data, its <b>personal</b> one (solid, circles); the thin lines are single silos.{rest}</p>"
        f"<div class='panels'>{panels}</div>"
    )


def data_section(study: Study) -> str:
    m = study.manifest
    if m is None or not study.task.one_class:
        return ""
    more = f" The circles are of seed {e(str(m['seed']))}; every seed splits anew." if len(study.seeds) > 1 else ""
    return (
        "<h2>Who holds what</h2><p class='lead'>One circle per silo and class; its area is the number of training samples.</p>"
        f"<figure>{both_widths(charts.label_circles(m, 820), charts.label_circles(m, 350))}"
        f"<figcaption>{e(str(m['dataset']))} split by {e(str(m['partition']))}.{more} Shown because these data are public or "
        "all on this machine: a hospital's label counts never leave it.</figcaption></figure>"
    )


def relationships_section(study: Study) -> str:
    found = study.relationships
    if found is None:
        return ""
    first = e(found.names[0])
    return (
        f"<h2>Who learns from whom</h2><p class='lead'>{e(study.related_by)}.</p>"
        f"<div class='side'><figure>{both_widths(charts.relationship_map(found, 600), charts.relationship_map(found, 350))}"
        f"<figcaption>After round {found.rounds[-1]}. Stronger is darker or larger; orange with a minus sign is negative. A "
        "silo's vector stays in the silo: it is shown because all silos of this run were on this machine.</figcaption></figure>"
        f"<div class='panels'><figure><h3>{first} to all silos, by round</h3>{charts.trajectories(found, False)}</figure>"
        f"<figure><h3>Every silo to itself, by round</h3>{charts.trajectories(found, True)}"
        "<figcaption>The strongest six are named.</figcaption></figure></div></div>"
    )


def cost_section(study: Study) -> str:
    if not study.runs:
        return ""
    rows = []
    for m in study.methods:
        down, up = (typical(study.per_round(m, k)) for k in ("bytes_down", "bytes_up"))
        seconds = study.training_seconds(m)
        total, time_ = study.cost(m)
        parts = [study_seconds(study, m, k) for k in ("train", "communicate", "aggregate")]
        row = [
            size_text(down),
            size_text(up),
            size_text(total),
            duration(typical(seconds)),
            duration(max(seconds.values(), default=0.0)),
            duration(time_),
            *parts,
        ]
        rows.append(f'<th scope="row">{e(spelled(m))}</th>{cells(row)}')
    head = [
        "Method",
        "Down<br>per round",
        "Up<br>per round",
        "Bytes<br>in all",
        "Median<br>round",
        "Slowest<br>round",
        "Run",
        "of it<br>training",
        "of it<br>exchange",
        "of it<br>aggregation",
    ]
    seeds = " of one run, mean over seeds" if len(study.seeds) > 1 else ""
    return (
        f"<h2>What it cost</h2><p class='lead'>Bytes of model vectors over all silos, and wall time{seeds}.</p>"
        f"{table(head, rows)}<div class='panels two' style='margin-top:20px'>"
        f"<figure><h3>Bytes per round</h3>{charts.bytes_per_round(study)}</figure>"
        f"<figure><h3>Seconds per round</h3>{charts.seconds_per_round(study)}</figure></div>"
    )


def study_seconds(study: Study, method: str, part: str) -> str:
    known = [r["seconds"][part] for r in study.of(method) if r["seconds"].get(part) is not None]
    return duration(sum(known) / len(known)) if known else "–"


def left_section(study: Study) -> str:
    if not study.runs:
        return ""
    known = strategies()
    rows = []
    for m in study.methods:
        s = known.get(m)
        per_silo = bytes_up_per_silo(study, m)
        vectors = ", ".join(s.client.uploads) if s and s.client.uploads else "none"
        numbers = ", ".join(s.client.sends_numbers) if s and s.client.sends_numbers else "none"
        size = "–" if not per_silo else f"{size_text(per_silo)}<small>{per_silo / 4:,.0f} numbers</small>"
        rows.append(
            f'<th scope="row">{e(spelled(m))}</th><td class="text"><code>{e(vectors)}</code></td><td>{size}</td>'
            f'<td class="text"><code>{e(numbers)}</code></td>'
        )
    metrics = ", ".join(study.metrics_that_left) or "none"
    allowed = ", ".join(study.task.metrics)
    silo_rows = []
    for silo in study.silos:
        found = [study.replies.get((m, silo), (0, 0)) for m in study.methods]
        sent = sum(silo_bytes(study, m, silo) for m in study.methods)
        silo_rows.append(
            f'<th scope="row">{e(silo)}</th>'
            + cells([str(sum(f[0] for f in found)), size_text(sent), f"{sum(f[1] for f in found):,}"])
        )
    kept = "".join(f"{e(spelled(m))}: {e(k)}, " for m in study.methods if m in known for k in known[m].keeps)
    card = "name, numbers of training, validation and test samples, task, input shape, number of classes, device, software versions"
    return (
        "<h2>What left each silo</h2><p class='lead'>Everything that leaves a silo passes one gate, is on its list, and is logged "
        "there.</p><ul>"
        f"<li><b>Once, the data card</b>: {card}; for tables and measurements, each column's sum and sum of squares where all silos agree "
        'on one standardisation (<code>normalization = "agreed"</code>).</li>'
        "<li><b>Every round, model vectors</b> and the method's own numbers, as below (and BatchNorm averages where the model "
        'has them and <code>buffers = "shared"</code>).</li>'
        f"<li><b>Every evaluated round, metrics</b>: {e(metrics)} (allowed: {e(allowed)}), over at least the set number of "
        "samples; seconds; sample counts.</li>"
        f"<li><b>Never</b>: samples, labels, label counts, predictions, {kept}personal layers "
        "and personal models that a method does not name below.</li></ul>"
        + table(["Method", "Vectors", "per silo<br>and round", "Other numbers"], rows, kind="wordy")
        + "<h3>Per silo</h3>"
        + table(
            ["Silo", "Replies with<br>metrics", "Model<br>vectors", "Single metric<br>values"], silo_rows, kind="dense"
        )
    )


def bytes_up_per_silo(study: Study, method: str) -> float:
    """Bytes of vectors that one silo sends in a typical round."""
    shares = [
        up / n for r, up in study.per_round(method, "bytes_up").items() if (n := len(senders(study, method, r))) and up
    ]
    return sorted(shares)[len(shares) // 2] if shares else 0.0


def senders(study: Study, method: str, server_round: int) -> set[tuple[int, str]]:
    return study.senders.get((method, server_round), set())


def silo_bytes(study: Study, method: str, silo: str) -> float:
    """Bytes of vectors that a silo sent over all rounds and seeds: its share of each round's."""
    total = 0.0
    for row in study.history.rows:
        if row.strategy == method and row.metric == "bytes_up" and row.value:
            here = {s for seed, s in senders(study, method, row.round) if seed == row.seed}
            total += row.value / len(here) if silo in here else 0.0
    return total


def repeat_section(study: Study) -> str:
    again = "\n".join(commands(study))
    settings = "\n".join(f"{k} = {v!r}" for k, v in study.config.items())
    return (
        "<h2>Repeat it</h2><p class='lead'>The same settings and seed give the same numbers on the same machine and number of "
        "threads.</p>"
        f"<pre>{e(again)}</pre>"
        "<p class='note'><code>config.toml</code> beside this file holds every setting, <code>history.csv</code> every value, "
        "<code>summary.json</code> the final ones.</p>"
        f"<details><summary>All settings</summary><pre>{e(settings)}</pre></details>"
    )


def commands(study: Study) -> list[str]:
    """What to type to get this study again, and what one may want next."""
    run = shlex.quote(str(study.path))
    c, standard = study.config, defaults()
    changed = {k: v for k, v in c.items() if k not in ("strategy", "seed", "rounds") and standard.get(k) != v}
    named = {k: changed.pop(k) for k in ("dataset", "partition", "silos") if k in changed}
    pairs = [shlex.quote(f"{k}={plain(v)}") for k, v in changed.items()]
    main = f"--strategy {shlex.quote(str(c['strategy']))} --rounds {c.get('rounds')} --seed {c.get('seed')}"
    sets = f" --set {' '.join(pairs)}" if pairs else ""
    silo = study.silos[0] if study.silos else "hospital-01"
    if study.simulated:
        data = "".join(
            f" --{k} {shlex.quote(str(v))}" for k, v in named.items() if k != "dataset" or not str(v).endswith(".npz")
        )
        if str(named.get("dataset", "")).endswith(".npz"):
            data += f" --data {shlex.quote(str(named['dataset']))}"
        method = study.personalised or study.best or alone()
        return [
            "# from the settings of this directory",
            f"silofl simulate --config {run}/config.toml --out runs/again",
            "# the same, in full",
            f"silofl simulate {main}{data}{sets}",
            "# this page again; one silo's model",
            f"silofl report {run}",
            f"silofl export {run} --silo {shlex.quote(silo)} --strategy {shlex.quote(method)} --out {shlex.quote(silo)}.safetensors",
        ]
    if study.manifest is not None and not (study.path / "study").exists():
        n = c.get("silos")
        first = {"strategy": c["strategy"], "seed": c["seed"], "rounds": c.get("rounds"), "silos": n}
        pairs = [
            f"{k}={toml(v)}" for k, v in (first | {k: v for k, v in named.items() if k != "silos"} | changed).items()
        ]
        return [
            "# Flower's simulation",
            f"flwr run . local --federation-config 'num-supernodes={n}' --run-config {shlex.quote(' '.join(pairs))}",
            f"silofl report {run}",
        ]
    note = study.path / "study"
    file = note.read_text() if note.exists() else ""
    return [
        f"silofl up {shlex.quote(file)}" if file else "# with the federation up",
        f"silofl run --config {run}/config.toml --out runs/again",
        "# the same, in full",
        f"silofl run {main}{sets}",
        "# this page again",
        f"silofl report {run}",
    ]


def plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def toml(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else plain(value)


def footer(study: Study) -> str:
    try:
        release = version("silofl")
    except PackageNotFoundError:  # inside a Flower app bundle
        release = ""
    papers = [f"{e(spelled(m))}: {e(s.paper)}" for m in study.methods if (s := strategies().get(m)) and exchanges(m)]
    return f"silofl {e(release)}. " + "; ".join(papers) + ("." if papers else "")
