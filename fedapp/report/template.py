"""The template of all pages, with the style sheet: wide and narrow, and print.

Jinja2 escapes every text that is no markup already, so names from outside are always texts.
"""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, StrictUndefined

from fedapp.outputs import Kind, begins_with

STYLE = """\
:root { --paper: #fff; --ink: #222; --quiet: #5a5a5a; --line: #aaa; --grid: #e4e4e4;
  --blue: #0072b2; --vermilion: #d55e00; --red: #b3261e; --warm: #fdf3ec; --cool: #f4f6f8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--grid); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; }
.lead { font-size: 1.1rem; font-weight: 600; margin: 1rem 0; overflow-wrap: anywhere; }
nav { margin: .75rem 0; }
a { color: var(--blue); }
.quiet, figcaption { color: var(--quiet); font-size: .875rem; }
.quiet, td, th { overflow-wrap: break-word; }
/* Red is for measures that are not in force. */
.warning, .alarm, .seats { border-left: 4px solid var(--line); background: var(--cool);
  padding: .5rem .9rem; overflow-wrap: anywhere; }
.alarm { border-left-color: var(--red); background: var(--warm); }
.seats { margin: 1rem 0; font-size: .9rem; }
.seats p { margin: .15rem 0; }
dl { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1.25rem 0 0; }
dl div { flex: 1 1 auto; border: 1px solid var(--grid); border-radius: 6px; padding: .5rem .8rem; }
dt { color: var(--quiet); font-size: .8rem; }
dd { margin: 0; font-size: 1.3rem; font-weight: 600; white-space: nowrap; }
/* Shades show where a table goes on beyond the edge of a narrow screen. */
.wide { overflow-x: auto; margin: .75rem 0;
  background: linear-gradient(to right, var(--paper) 40%, transparent) left / 2rem 100% local,
    linear-gradient(to left, var(--paper) 40%, transparent) right / 2rem 100% local,
    linear-gradient(to right, var(--line), transparent) left / .6rem 100% scroll,
    linear-gradient(to left, var(--line), transparent) right / .6rem 100% scroll;
  background-repeat: no-repeat; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--grid); min-width: 4rem; }
th { color: var(--quiet); font-weight: 500; border-bottom-color: var(--line); }
.n { text-align: right; white-space: nowrap; }
td:first-child, td > span { white-space: nowrap; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
  gap: 1.25rem; align-items: start; }
figure { margin: 0; break-inside: avoid; min-width: 0; }
figure > svg { width: 100%; height: auto; display: block; }
.matrix td, .matrix th { padding: .35rem .6rem; min-width: 3.2rem; }
.matrix th:first-child { padding-left: 0; }
/* The tree takes the screen's whole width, beyond the column of the text. */
.full { margin-inline: calc(50% - 50vw + 1rem); padding-inline: 0; }
.full .tree { width: max-content; min-width: min(100%, 60rem); margin: 0 auto; }
.full figcaption { max-width: 60rem; margin: 0 auto; }
.tree, .tree ul { list-style: none; margin: 0; padding: 0; position: relative; }
.tree { font-size: .75rem; line-height: 1.25; padding: .25rem 0 .75rem; }
.tree li { display: flex; align-items: center; position: relative; padding: .15rem 0; }
.tree ul { margin-left: .7rem; }
.tree ul::before { content: ""; position: absolute; left: -.7rem; top: 50%; width: .7rem;
  border-top: 1px solid var(--line); }
.tree ul > li { padding-left: .5rem; }
.tree ul > li::before { content: ""; position: absolute; left: 0; top: 50%; width: .5rem;
  border-top: 1px solid var(--line); }
.tree ul > li::after { content: ""; position: absolute; left: 0; top: 0; bottom: 0;
  border-left: 1px solid var(--line); }
.tree ul > li:first-child::after { top: 50%; }
.tree ul > li:last-child::after { bottom: 50%; }
.branch, .more { color: var(--quiet); font-size: .7rem; padding: 0 .25rem; white-space: nowrap; }
.split, .leaf { border: 1px solid var(--line); border-radius: 5px; padding: .15rem .4rem;
  white-space: nowrap; background: var(--paper); }
.split span, .split small { display: block; }
.split small { color: var(--quiet); font-size: .68rem; }
.leaf { border-radius: 999px; font-weight: 600; font-variant-numeric: tabular-nums; }
/* Text needs more contrast with the paper than a line does. */
.up { border-color: var(--blue); color: color-mix(in srgb, var(--blue) 75%, var(--ink)); }
.down { border-color: var(--vermilion);
  color: color-mix(in srgb, var(--vermilion) 75%, var(--ink)); }
@media (max-width: 62rem) {
  .tree li { display: block; }
  .tree ul { margin-left: .8rem; }
  .tree ul::before, .tree ul > li::after { display: none; }
  .tree ul > li { padding: .25rem 0 0 .7rem; border-left: 1px solid var(--line); }
  .tree ul > li:last-child { border-left-color: transparent; }
  .tree ul > li::before { top: .85rem; width: .6rem; }
  .tree ul > li:last-child::after { display: block; top: 0; bottom: auto; height: .85rem;
    left: -1px; }
  .split, .leaf { display: inline-block; }
  .split span, .split small { display: inline; }
  .split small { padding-left: .5rem; }
}
summary { cursor: pointer; margin-top: .75rem; }
.attack { border: 1px solid var(--grid); border-radius: 6px; padding: .6rem .8rem; min-width: 0;
  overflow-wrap: anywhere; --bar: var(--blue); }
.above { --bar: var(--vermilion); }
.attack p { margin: .35rem 0 0; }
.success b { font-size: 1.25rem; }
.bar { position: relative; height: .9rem; margin: .4rem 0; background: var(--grid); }
.bar i { position: absolute; top: 0; height: 100%; }
.bar .interval { background: color-mix(in srgb, var(--bar) 40%, transparent); }
.bar .reached { top: 30%; height: 40%; background: var(--bar); }
.bar .chance { top: -20%; height: 140%; width: 2px; margin-left: -1px; background: var(--ink); }
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; }
  h2 { break-after: avoid; }
  tr, dl div, .warning, .alarm, .seats, .attack { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; }
  .wide { overflow: visible; }
  .full { margin-inline: 0; }
  table { font-size: 8.5pt; }
}
"""

HTML = Kind("a page", (".html", ".htm"), begins_with(b'<meta name="generator" content="fedapp">'))

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="generator" content="fedapp">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
{{ style }}</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="quiet">{{ subtitle }}</p>
{% if lead %}
<p class="lead">{{ lead }}</p>
{% endif %}
{% for body in below %}
{{ body }}
{% endfor %}
{% if sections %}
<nav>{% for name in sections %}<a href="#{{ name | anchor }}">{{ name }}</a>
{%- if not loop.last %} · {% endif %}{% endfor %}</nav>
{% endif %}
{% for line in warnings %}
<p class="warning">{{ line }}</p>
{% endfor %}
{% if numbers %}
<dl>{% for name, value in numbers.items() %}<div><dt>{{ name }}</dt><dd>{{ value }}</dd></div>
{%- endfor %}</dl>
{% endif %}
{% for name, body in sections.items() %}
<section id="{{ name | anchor }}">
<h2>{{ name }}</h2>
{{ body }}
</section>
{% endfor %}
</body>
</html>
"""

ELEMENTS = """\
{% macro row(tag, cells, n_texts) %}
<tr>{% for cell in cells %}<{{ tag }}{% if loop.index0 >= n_texts %} class="n"{% endif %}>
{{- cell }}</{{ tag }}>{% endfor %}</tr>
{% endmacro %}

{% macro table(header, rows, n_texts=1) %}
<div class="wide"><table>
<thead>{{ row("th", header, n_texts) }}</thead>
<tbody>
{% for cells in rows %}{{ row("td", cells, n_texts) }}{% endfor %}
</tbody></table></div>
{% endmacro %}

{% macro figures(images) %}
{% if images %}
<div class="figures">
{% for caption, drawing in images.items() %}
<figure><svg role="img" aria-label="{{ caption }}"{{ drawing.to_svg()[4:] | safe -}}
<figcaption>{{ caption }}</figcaption></figure>
{% endfor %}
</div>
{% endif %}
{% endmacro %}

{% macro listed(lines) %}
{% if lines %}<ul>{% for line in lines %}<li>{{ line }}</li>{% endfor %}</ul>{% endif %}
{% endmacro %}

{% macro quiet(text) %}
{% if text %}<p class="quiet">{{ text }}</p>
{% endif %}
{% endmacro %}

{% macro seats(texts, unmet) %}
{% for line in unmet %}<p class="alarm">{{ line | sentence }}</p>{% endfor %}
{% if texts %}<div class="seats"><p><strong>Who could see what with these settings</strong></p>
{% for name, text in texts.items() %}<p><strong>{{ name }}</strong>: {{ text }}</p>
{% endfor %}</div>{% endif %}
{% endmacro %}

{% macro attacks(findings, unmeasured) %}
<p class="quiet">Bars go from 0 to 1: an attack's success, its 95 % interval in a lighter shade, and
chance as a line.</p>
<div class="figures">
{% for each in findings %}
<article class="attack{% if each.is_above_chance %} above{% endif %}">
<strong>{{ each.attack }}</strong> <span class="quiet">by {{ each.seat }}</span>
<p class="success"><b>{{ "%.3f" | format(each.success) }}</b>
[{{ "%.3f" | format(each.low) }}, {{ "%.3f" | format(each.high) }}] against
{{ "%.3f" | format(each.chance) }} by chance:
{{ "above chance" if each.is_above_chance else "no difference is shown" }}</p>
<div class="bar" role="img" aria-label="success and chance, from 0 to 1">
<i class="interval" style="left: {{ "%.2f" | format(100 * each.low) }}%;
 width: {{ "%.2f" | format(100 * (each.high - each.low)) }}%"></i>
<i class="reached" style="width: {{ "%.2f" | format(100 * each.success) }}%"></i>
<i class="chance" style="left: {{ "%.2f" | format(100 * each.chance) }}%"></i></div>
<p class="quiet">{{ each.measure[:1] | upper }}{{ each.measure[1:] }}. Interval
over {{ each.interval }}.</p>
<p class="quiet">Lowered, as measured elsewhere, by {{ each.lowered_by }}.
Cost: {{ each.cost }}.</p>
</article>
{% endfor %}
{% for each in unmeasured %}
<article class="attack"><strong>{{ each.attack }}</strong>
<span class="quiet">by {{ each.seat }}</span>
<p class="success">not measured: {{ each.why }}</p></article>
{% endfor %}
</div>
{% endmacro %}

{% macro headed(title, body) %}
{% if body %}<h3>{{ title }}</h3>
{{ body }}{% endif %}
{% endmacro %}

{% macro folded(title, body) %}
<details><summary>{{ title }}</summary>
{{ body }}
</details>
{% endmacro %}

{% macro confusion(names, rows, caption) %}
<figure><div class="wide"><table class="matrix"><thead><tr><th>true \\ predicted</th>
{%- for name in names %}<th class="n" scope="col">{{ name }}</th>{% endfor %}</tr></thead>
<tbody>
{% for cells in rows %}{% set actual = loop.index0 %}
<tr><th scope="row">{{ names[actual] }}</th>
{%- for weight, share in cells %}
<td class="n"{% if weight %} style="background: color-mix(in srgb, var(--
{{- "blue" if loop.index0 == actual else "vermilion" }}) {{ "%.0f" | format(50 * share) -}}
%, transparent)"{% endif %} title="{{ "%.1f" | format(100 * share) }}%">
{{- "{:,.0f}".format(weight) }}</td>
{%- endfor %}</tr>
{% endfor %}
</tbody></table></div><figcaption>{{ caption }}</figcaption></figure>
{% endmacro %}

{% macro link(run) %}<a href="{{ run }}/report.html">{{ run }}</a>{% endmacro %}

{% macro node(box) %}
<li>{% if box.branch %}<span class="branch">{{ box.branch }}</span>{% endif %}
{% if box.leaf %}<span class="leaf {{ box.side }}">{{ box.leaf }}</span>
{% else %}<span class="split"><span title="{{ box.name }}">{{ box.short_name }}</span> <span
{%- if box.full_rule %} title="{{ box.full_rule }}"{% endif %}>{{ box.rule }}</span> <small>
{{- box.facts }}</small></span>
{%- if box.n_below %}<span class="more" title="nodes below">+{{ box.n_below }}</span>{% endif %}
{% if box.children %}<ul>{% for child in box.children %}{{ node(child) }}{% endfor %}</ul>
{%- endif %}{% endif %}</li>
{% endmacro %}

{% macro tree(root, note) %}
<figure class="wide full"><ul class="tree">{{ node(root) }}</ul>
<figcaption>{{ note }}</figcaption></figure>
{% endmacro %}
"""


def _anchor(title: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in title.lower()).split())


_environment = Environment(
    autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
)
_environment.filters["anchor"] = _anchor
_environment.filters["sentence"] = lambda text: text[:1].upper() + text[1:]
page_template = _environment.from_string(PAGE)
elements: Any = _environment.from_string(ELEMENTS).module
