"""Jinja2 templates of the report's page; every value is escaped unless it is already markup.

They are strings in a .py file because a Flower app bundle contains no other assets.
"""

# ruff: noqa: E501
from __future__ import annotations

from functools import cache

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

TEMPLATES = {
    "page": """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{{ title }}</title>
<style>{{ css }}</style>
</head>
<body>
<main>
<header>
<p class="where">{{ where }}</p>
<h1>{{ sentence }}</h1>
<p class="lead">{{ lead }}</p>
{% if answer %}<div class="answer"><h2>Should we federate?</h2><p>{{ answer.sentence }}</p>{% if answer.condition %}<p class="note">{{ answer.condition }}</p>{% endif %}</div>{% endif %}
{{ faults }}
{{ tiles }}
<nav>{% for key, name, _ in sections %}<a href="#{{ key }}">{{ name }}</a>{% endfor %}</nav>
</header>
{% for key, _, body in sections %}
<section id="{{ key }}">{{ body }}</section>
{% endfor %}
<footer>{{ footer }}</footer>
</main>
</body>
</html>
""",
    "macros": """
{% macro table(head, kind="") %}
{% if head|length - (2 if kind == "silos" else 0) > 5 or kind in ("wordy", "reasons") %}<p class="swipe note" aria-hidden="true">more columns →</p>{% endif %}
<div class="scroll" tabindex="0"><table class="{{ kind }}"><thead><tr><th>{{ head[0] }}</th>{% for name in head[1:] %}<th scope="col">{{ name }}</th>{% endfor %}</tr></thead>{{ caller() }}</table></div>
{% endmacro %}
{% macro cells(values) %}{% for value in values %}<td>{{ value }}</td>{% endfor %}{% endmacro %}
{% macro widths(pair) %}<div class="wide">{{ pair[0] }}</div><div class="narrow">{{ pair[1] }}</div>{% endmacro %}
{% macro explained() %}<details class="note"><summary>What is this?</summary>{{ caller() }}</details>{% endmacro %}
{% macro rare(text, mark) %}{% if text %}<p class="note">{{ mark }} {{ text }}. Scores are those of the last round that a hospital took part in.</p>{% endif %}{% endmacro %}
""",
    "faults": """{% if faults or notes %}<div class="fault">{% for fault in faults %}<p>{{ fault }}.</p>{% endfor %}
{% if notes %}<p>From the run's log:</p>{% for when, message, times in notes %}<p><span class="note">{{ when }}</span> {{ message }}.{% if times != 1 %} ({{ times }} times){% endif %}</p>{% endfor %}{% endif %}
</div>{% endif %}""",
    "tiles": """<dl class="tiles"{% if tiles|length < 4 %} style="grid-template-columns: repeat({{ tiles|length }}, 1fr)"{% endif %}>
{% for name, value, below in tiles %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd><dd>{{ below }}</dd></div>{% endfor %}</dl>""",
    "silos": """{% from "macros" import table, cells, widths, rare with context %}
<h2>What each hospital gained</h2><p class='lead'>{{ lead }}</p>
<figure>{% if figure %}{{ widths(figure) }}{% endif %}</figure>
{% call table(head, "silos") %}<tbody>
{% for row in rows %}<tr><th scope="row">{{ row.silo }}{{ row.mark }}<small class="phone">{{ row.train }} + {{ row.test }}</small></th><td class="desk">{{ row.train }}</td><td class="desk">{{ row.test }}{% if row.small %}<small>small</small>{% endif %}</td>
{%- for kind, text in row.cells %}<td class="{{ kind }}">{{ text }}</td>{% endfor %}</tr>{% endfor %}
</tbody><tfoot>{% for name, values in means %}<tr><th scope="row">{{ name }}</th><td class="desk"></td><td class="desk"></td>{{ cells(values) }}</tr>{% endfor %}</tfoot>{% endcall %}
<p class='note' style='margin-top:12px'>{{ intervals }}</p>
{% if withheld %}<p class="note">Withheld by the hospital because too few test samples stand behind them: {{ withheld|join(", ") }}.</p>{% endif %}
{{ rare(rare_text, mark) }}
{% if joined %}<p class="note">{{ joined|join("; ") }}. Its gain compares runs in which it trained for fewer rounds than the others; training alone counts from the round in which it joined that run.</p>{% endif %}
{% for title, found in absences if found %}<h3>{{ title }}</h3>
{% call table(["Hospital", "Method, seed", "Rounds", "Last reason"], "reasons") %}<tbody>{% for method, seed, silo, n, reason in found %}<tr><th scope="row">{{ silo }}</th><td>{{ method }}, {{ seed }}</td><td>{{ n }}</td><td class="text">{{ reason }}</td></tr>{% endfor %}</tbody>{% endcall %}
{% endfor %}""",
    "methods": """{% from "macros" import table, cells, widths, explained, rare with context %}
<h2>How the methods compare</h2><p class='lead'>Each hospital counts alike, however large it is.
{%- if seeds > 1 %} Means over {{ seeds }} seeds, ± standard deviation; each seed splits the data anew.{% endif %}</p>
{% call table(head, "methods") %}<tbody>{% for row in rows %}<tr><th scope="row">{{ row.name }}<small>{{ row.key }}<span class="desk">, {{ row.snapshot }} local training</span></small></th>{{ cells(row.cells) }}</tr>{% endfor %}</tbody>{% endcall %}
{% call explained() %}<dl class='terms'>{% for term, meaning in terms %}<dt>{{ term }}</dt><dd>{{ meaning }}</dd>{% endfor %}</dl>{% endcall %}
{{ rare(rare_text, mark) }}
{% if compared %}<figure>{{ widths(compared) }}<figcaption>Gain over {{ base }}: mean over hospitals with its 95&#8239;% interval, from {{ needed }} hospitals on; each circle below is a hospital, a larger one several with equal gains.</figcaption></figure>{% endif %}
{% if gains %}<h3>Gain over {{ base }}</h3>
{% call table(gain_head) %}<tbody>{% for name, values in gains %}<tr><th scope="row">{{ name }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}
{% call explained() %}<p>Student's t over the hospitals' gains in {{ word }}, each a mean over its seeds, from {{ needed }} hospitals on. The spread between hospitals contains the error of their test patients. The hospitals count as drawn independently from hospitals like these, and the interval holds for these seeds. Intervals and p values are corrected for the number of methods (Bonferroni){% if first %}; {{ first }}, which validation data chose, comes first and has its 5&#8239;% to itself{% endif %}. The headline is decided by the same interval.</p>{% endcall %}{% endif %}
{% if every %}<h3>All methods per hospital</h3><p class='note'>Test {{ word }} in per cent{% if base %}, and the paired difference to {{ base }}{% endif %}; the best of each hospital in bold.</p>
{% call table(every_head) %}<tbody>{% for silo, found in every %}<tr><th scope="row">{{ silo }}</th>{% for kind, text in found %}<td class="{{ kind }}">{{ text }}</td>{% endfor %}</tr>{% endfor %}</tbody>{% endcall %}{% endif %}""",
    "evidence": """{% from "macros" import table, cells, explained with context %}
<h2>Evidence per hospital</h2><p class='lead'>{{ first }}{% if second %}, and small below it {{ second }}{% endif %}: each hospital measures its reported model once, on its own test samples ({{ tested }}).{% if seeds > 1 %} Numbers are means over {{ seeds }} seeds; {% if task == "regression" %}limits, intervals, charts and {% elif task != "segmentation" %}sets, charts and {% endif %}subgroups are of the first seed that has them.{% endif %} The numbers of the table have no intervals: with few samples they can be far from the ideal, or differ between methods, by chance alone.</p>
{% call table(head) %}<tbody>{% for silo, values in rows %}<tr><th scope="row">{{ silo }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}
{% if task == "regression" %}{% call explained() %}<dl class='terms'>
<dt>Unit</dt><dd>The measurement's own.{% if several %} Subgroups have means over the measurements, each in its own unit.{% endif %}</dd>
<dt>Slope, intercept</dt><dd>Of the line through measurements by predictions (least squares); ideal 1 and 0. Below 1 high predictions are too high and low ones too low.</dd>
<dt>Difference</dt><dd>Mean of measured less predicted; ideal 0.</dd>
<dt>Limits of agreement</dt><dd>The mean difference and 1.96 standard deviations to either side. About 95&#8239;% of differences lie between, where they are normal.</dd>
<dt>Intervals</dt><dd>Prediction intervals that are to hold 90&#8239;% of measurements, which no theorem promises of shrunk widths: the share of test samples where they did, and their width. They reach as far as the hospital's own half width, shrunk towards the hospitals' common one; half of the test samples make it, the others count.</dd></dl>{% endcall %}{% elif task != "segmentation" %}{% call explained() %}<dl class='terms'>
<dt>Probability</dt><dd>{{ event }}.</dd>
<dt>Brier</dt><dd>Mean squared distance of probability and event; lower is better.</dd>
<dt>Slope</dt><dd>Ideal 1. Below 1 the model is too sure, above 1 not sure enough.</dd>
<dt>In the large</dt><dd>Ideal 0. Above 0 there are more events than predicted.</dd>
<dt>ECE</dt><dd>Mean distance of predicted and observed share over bins. It is too large where test parts are small: never read it alone.</dd>
<dt>Sets</dt><dd>Classes that are to hold the true one with a probability of 90&#8239;%, which no theorem promises of shrunk thresholds: the share of test samples where they did, and their mean number. The threshold is the hospital's own, shrunk towards the hospitals' common one; half of the test samples make it, the others count.</dd>
<dt>Net benefit</dt><dd>True positives per sample, less false positives at the odds of the threshold. The dashed line treats everybody, the line at 0 no one.</dd></dl>{% endcall %}{% endif %}
{% if groups %}<h3>Subgroups</h3><p class='note'>{% if task == "regression" %}Mean absolute error with its 95&#8239;% interval, and root of the mean squared one, in the label's unit{% else %}Test {{ score }} in per cent with its 95&#8239;% interval{% endif %}, by a column that the hospital chose. Small subgroups are suppressed in the hospital, and with them others, where they would follow by subtraction. Each interval is of one subgroup by itself: chance alone lets about {{ chance }} of those below miss.</p>
{% call table(group_head) %}<tbody>{% for silo, values in groups %}<tr><th scope="row">{{ silo }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}{% endif %}
{% if panels %}<h3>Reliability{% if panels[0][1]|length > 1 %} and net benefit{% endif %}</h3>
<p class='note'>{% if task == "regression" %}Predicted against measured, means of groups{% else %}Predicted against observed share{% endif %}; larger points stand for more samples; on the dashed diagonal predictions are right.{% if left %} {{ left }} more {{ "is" if left == 1 else "are" }} in summary.json.{% endif %}</p>
<div class='panels'>{% for silo, charts in panels %}<figure><h3>{{ silo }}</h3>{% for chart in charts %}{{ chart }}{% endfor %}</figure>{% endfor %}</div>{% endif %}""",
    "unseen": """{% from "macros" import table, cells, explained with context %}
<h2>Hospitals that did not train</h2><p class='lead'>{{ silos }} held out of the training, by the {{ word }} on their own test samples in per cent{% if seeds > 1 %}, means over {{ seeds }} seeds{% endif %}.</p>
{% call table(head) %}<tbody>{% for name, values in rows %}<tr><th scope="row">{{ name }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}
<p class='note'>{{ about }}</p>
{% call explained() %}<dl class='terms'><dt>Zero-shot</dt><dd>The model that the hospital gets as a newcomer, before it trains.</dd><dt>Personalised</dt><dd>Its own model after some epochs (hold-out-epochs) on what is its own; all that is shared stays as it was received.</dd><dt>Alone</dt><dd>Trained on its own samples only.</dd><dt>All in</dt><dd>The same method with the hospital in the training.</dd></dl>{% endcall %}
<h3>Each of them</h3>
{% call table(each_head) %}<tbody>{% for name, values in each %}<tr><th scope="row">{{ name }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}""",
    "rounds": """{% from "macros" import widths %}
<h2>{{ capital }} by round</h2><p class='lead'>How fast the hospitals' mean test {{ word }} rises.</p>
<figure>{{ widths(by_round) }}</figure>
{% if stopped %}<p class='note'>Early stopping: {{ stopped|join("; ") }}.</p>{% endif %}
<h3>Before and after local training</h3>
<p class='note'>In every round a hospital tests the model it <b>received</b> (dashed, squares) and, after training on its own data, its <b>personal</b> one (solid, circles); the thin lines are single hospitals.
{%- if panels|length < methods %} Shown are {{ panels|length }} of {{ methods }} methods; history.csv has all.{% endif %}</p>
<div class='panels'>{% for name, chart in panels %}<figure><h3>{{ name }}</h3>{{ chart }}</figure>{% endfor %}</div>""",
    "data": """{% from "macros" import widths %}
<h2>Who holds what</h2><p class='lead'>One circle per hospital and class; its area is the number of training samples.</p>
<figure>{{ widths(circles) }}<figcaption>{{ dataset }} split by {{ partition }}.
{%- if seeds > 1 %} The circles are of seed {{ seed }}; every seed splits anew.{% endif %} Shown because these data are public or all on this machine: a hospital's label counts never leave it.</figcaption></figure>""",
    "relationships": """{% from "macros" import widths, explained with context %}
<h2>Who learns from whom</h2><p class='lead'>Each row is a hospital: how much its model takes from each column's.</p>
{% call explained() %}<p>{{ related_by }}.</p>{% endcall %}
<div class='side'><figure>{{ widths(map) }}<figcaption>After round {{ last }}. Stronger is darker or larger; orange with a minus sign is negative. A hospital's vector stays in the hospital: it is shown because all hospitals of this run were on this machine.</figcaption></figure>
<div class='panels'><figure><h3>{{ first }} to all hospitals, by round</h3>{{ to_all }}</figure>
<figure><h3>Every hospital to itself, by round</h3>{{ to_itself }}<figcaption>The strongest six are named.</figcaption></figure></div></div>""",
    "cost": """{% from "macros" import table, cells with context %}
<h2>What it cost</h2><p class='lead'>Bytes of model vectors over all hospitals, and wall time{% if seeds > 1 %} of one run, mean over seeds{% endif %}.</p>
{% call table(head) %}<tbody>{% for name, values in rows %}<tr><th scope="row">{{ name }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}
<div class='panels two' style='margin-top:20px'><figure><h3>Bytes per round</h3>{{ bytes }}</figure><figure><h3>Seconds per round</h3>{{ seconds }}</figure></div>""",
    "left": """{% from "macros" import table, cells with context %}
<h2>What left each hospital</h2><p class='lead'>Everything that leaves a hospital passes one gate, is on its list, and is logged there.</p><ul>
<li><b>Once, the data summary</b>: name, numbers of training, validation and test samples, task, input shape, number of classes, names of columns and labels with declared units and ranges, number format, device, software versions; for tables and measurements, each column's sum and sum of squares where all hospitals agree on one standardisation (<code>normalization = "agreed"</code>).</li>
<li><b>Every round, model vectors</b> and the method's own numbers, as below (and BatchNorm averages where the model has them and <code>buffers = "shared"</code>).</li>
<li><b>Every evaluated round, metrics</b>: {{ metrics }} (allowed: {{ allowed }}), over at least the set number of patients; seconds; sample counts.</li>
{% if evidence %}<li><b>Once, at the end, evidence</b>: {{ evidence }}, over at least the set number of patients. Of two classes it tells how many test samples are of each.</li>
{% endif %}{% for method, silos in own %}<li><b>Once, at the end, a hospital's own model</b> with all its layers (<code>keep-models = "reported"</code>; {{ method }}): {{ silos or "of none so far" }}.</li>
{% endfor %}<li><b>Never</b>: samples, labels, {% if evidence %}other {% endif %}label counts, predictions, {% for method, what in kept %}{{ method }}: {{ what }}, {% endfor %}personal layers and personal models that a method does not name below{% if own %}, but for the models above{% endif %}.</li></ul>
{% call table(head, "wordy") %}<tbody>{% for row in rows %}<tr><th scope="row">{{ row.name }}</th><td class="text"><code>{{ row.vectors }}</code></td><td>{{ row.size }}</td><td class="text"><code>{{ row.numbers }}</code></td></tr>{% endfor %}</tbody>{% endcall %}
<h3>Per hospital</h3>
{% call table(silo_head, "dense") %}<tbody>{% for silo, values in silos %}<tr><th scope="row">{{ silo }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}""",
    "privacy": """{% from "macros" import table, cells, widths, explained with context %}
<h2>What differential privacy cost</h2><p class='lead'>Protected is a {{ unit }}: all that a hospital sent in a run tells little of any single one. Epsilon bounds how little; delta is the chance that the bound fails.</p>
{% call table(head, "dense") %}<tbody>{% for silo, values in rows %}<tr><th scope="row">{{ silo }}</th>{{ cells(values) }}</tr>{% endfor %}</tbody>{% endcall %}
{% call explained() %}<dl class='terms'><dt>Epsilon</dt><dd>With or without one {{ unit }}, the probability of anything that the hospital can send differs by a factor of at most e to the power of epsilon. Below 1 is strong, above 10 is weak.</dd><dt>Not covered</dt><dd>Numbers of samples, seconds, what other runs sent, and models that a hospital keeps for itself.</dd></dl>{% endcall %}
<p class="note">Each row is one run by itself, as the hospital's last reply said: a round whose reply was lost is not in it.{% if several %} Runs on the same data add up.{% endif %} A hospital's own ledger adds all runs (<code>silofl budget</code>).{% if simulated %} In a simulation the noise comes from the seed: these numbers show what a deployed run costs. They protect no data.{% endif %}{% if without %} Without differential privacy: {{ without|join(", ") }}.{% endif %}</p>
{% if figure %}<figure>{{ widths(figure) }}<figcaption>Test {{ word }} in per cent against the epsilon spent so far: a thin line per hospital, a thick one for their mean.</figcaption></figure>{% endif %}""",
    "tuning": """{% from "macros" import table, cells with context %}
<h2>How the methods were tuned</h2><p class='lead'>{{ trials }} trials of each method{% if searches > 1 %} in each of {{ searches }} searches, one per seed{% endif %} ({{ sampler }}{% if rounds %}, {{ rounds }} rounds{% endif %}). Validation data chose, by the {{ objective }} of {{ word }}; the search read no test score.</p>
{% call table(head, "wordy") %}<tbody>{% for name, values in rows %}<tr><th scope="row">{{ name }}</th>{% for value in values %}<td{% if loop.index == 6 %} class="text"{% endif %}>{{ value }}</td>{% endfor %}</tr>{% endfor %}</tbody>{% endcall %}
<p class='note'>{% if equal %}Every method had the same number of trials and of rounds.{% else %}Every method had the same number of trials. Their rounds differ, where trials were pruned, failed or stopped early.{% endif %}
{%- if rounds and rounds|string != here|string %} The runs of this page have {{ here }} round{{ "" if here == 1 else "s" }}.{% endif %}
{%- if unsearched %} Seeds {{ unsearched|join(", ") }} have the settings of seed {{ searched }}. Where the seed draws the split, their test samples may have been training or validation samples of the search, so their scores may be too high.{% endif %} A method with more settings has the same trials for a larger space.</p>
{% if spent %}<p class='note'>Each trial trains on the same patients, so the trials' privacy costs add up. All trials together: {% for seed, epsilon, delta in spent %}epsilon {{ epsilon }} at delta {{ delta }} (seed {{ seed }}){% if not loop.last %}, {% endif %}{% endfor %}, at the hospital that spent most. The runs of this page come on top. Validation scores chose the settings and have no noise: this epsilon does not cover the patients of the validation parts.</p>{% endif %}
<details><summary>The space</summary><pre>{{ space|join("\n") }}</pre></details>""",
    "repeat": """<h2>Repeat it</h2><p class='lead'>The same settings and seed give the same numbers on the same machine and number of threads.</p>
<pre>{{ commands|join("\n") }}</pre>
<p class='note'><code>config.toml</code> beside this file holds every setting, <code>history.csv</code> every value, <code>summary.json</code> the final ones.</p>
<details><summary>All settings</summary><pre>{{ settings|join("\n") }}</pre></details>""",
}


@cache
def environment() -> Environment:
    """Return the templates' environment: values are escaped, and a missing value is an error."""
    return Environment(
        loader=DictLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def render(name: str, **values: object) -> Markup:
    """Return a template rendered with these values."""
    return Markup(environment().get_template(name).render(**values))
