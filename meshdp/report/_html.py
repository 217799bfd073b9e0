"""The report as one HTML file: no script, no font and no address but its own."""

import html

from meshdp.report._report import Report
from meshdp.report._sections import Section, sections

_STYLE = """
.meshdp-report {
  --back: #ffffff; --ink: #1b1f24; --soft: #59636e; --line: #d5dae0; --card: #f5f7f9;
  color-scheme: light dark;
  background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  max-width: 68rem; margin: 0 auto; padding: 1rem; box-sizing: border-box;
}
@media (prefers-color-scheme: dark) {
  .meshdp-report {
    --back: #14171b; --ink: #e4e8ec; --soft: #9aa5b1; --line: #363d46; --card: #1c2127;
  }
}
.meshdp-report h1 { font-size: 1.5rem; margin: 0 0 .5rem; overflow-wrap: anywhere; }
.meshdp-report h2 { font-size: 1.1rem; margin: 1.8rem 0 .4rem; }
.meshdp-report p { margin: .2rem 0; overflow-wrap: anywhere; }
.meshdp-report .summary { background: var(--card); border-radius: 8px; padding: .8rem 1rem; }
.meshdp-report .note { color: var(--soft); }
.meshdp-report .scroll { overflow-x: auto; margin: .5rem 0; }
.meshdp-report table { border-collapse: collapse; font-size: .88rem; }
.meshdp-report th, .meshdp-report td {
  padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; vertical-align: top; background: none; color: inherit;
}
.meshdp-report .word { text-align: left; white-space: pre; }
.meshdp-report th { color: var(--soft); font-weight: 600; }
.meshdp-report .pictures { display: flex; flex-wrap: wrap; gap: 1rem; }
.meshdp-report figure { margin: 0; flex: 0 1 auto; min-width: 0; max-width: 100%; }
.meshdp-report figcaption {
  font-size: .82rem; color: var(--soft); overflow-wrap: anywhere; max-width: 26rem;
}
.meshdp-report svg { width: 100%; height: auto; min-width: 11rem; font: 11px system-ui; }
.meshdp-report svg text { fill: var(--ink); }
.meshdp-report svg .edge { stroke: var(--ink); stroke-opacity: .35; }
.meshdp-report svg .device { fill: var(--card); stroke: var(--ink); stroke-opacity: .5; }
.meshdp-report svg .grid { stroke: var(--line); }
.meshdp-report pre { font-size: .8rem; overflow-x: auto; }
"""


def fragment(report: Report) -> str:
    """The report with its style, to be put into a page or a notebook."""
    parts = [_section(s, first=k == 0) for k, s in enumerate(sections(report, most=None))]
    return f'<div class="meshdp-report"><style>{_STYLE}</style>{"".join(parts)}</div>'


def page(report: Report) -> str:
    """A whole document."""
    title = html.escape(f"{report.name}: report of a compiled step")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title>"
        "<style>html{color-scheme:light dark}body{margin:0}"
        "@media (prefers-color-scheme: dark){body{background:#14171b}}</style></head>"
        f"<body>{fragment(report)}</body></html>\n"
    )


def _section(s: Section, first: bool) -> str:
    say = html.escape
    if first:
        lines = "".join(f"<p>{say(line)}</p>" for line in s.lines)
        return f'<h1>{say(s.title)}</h1><div class="summary">{lines}</div>'
    parts = [f"<h2>{say(s.title)}</h2>"]
    parts += [f'<p class="note">{say(line)}</p>' for line in s.lines]
    if s.rows:
        cell = lambda tag, k, text: (
            f"<{tag}{' class=word' if s.is_word(k) else ''}>{say(text)}</{tag}>"
        )
        head = "".join(cell("th", k, text) for k, text in enumerate(s.header))
        body = "".join(
            "<tr>" + "".join(cell("td", k, text) for k, text in enumerate(row)) + "</tr>"
            for row in s.rows
        )
        parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
            f"<tbody>{body}</tbody></table></div>"
        )
    if s.pictures:
        parts.append('<div class="pictures">')
        for p in s.pictures:
            drawing = p.svg or f"<pre>{say(p.text)}</pre>"
            parts.append(f"<figure>{drawing}<figcaption>{say(p.caption)}</figcaption></figure>")
        parts.append("</div>")
    return "".join(parts)
