"""Reads pmap-era code, says what today's JAX makes of it, and rewrites it.

    python -m compat check PATHS...
    python -m compat fix PATHS... [--diff] [--to compat|jax|meshdp]

`check` needs nothing but Python: it parses with `ast`, which is several times faster than a
tree that keeps comments. `fix` rewrites with libcst, which does keep them:
`pip install 'meshdp[migrate]'`.

- `_scopes`: what each name in a module stands for, however it was imported.
- `_removed`, `_renames`: what JAX no longer has, and what to write now.
- `_maps`: which expressions are mapped functions, and which values are their results.
- `_rules`: the findings, one `Rule` each, and `_find`: the functions that look for them.
- `_edits`, `_rewrite`, `_imports`: changes to the source, as data and as applied.
- `_meshdp`: a recognised training step, taken out of pmap.
- `_sources`, `_report`, `cli`: files and notebooks in, text, JSON, SARIF and exit code out.
"""
