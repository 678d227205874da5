"""Formulas: which text is one, how it becomes HTML, and what readers see where KaTeX is missing."""

import json
import re
from types import SimpleNamespace

import formulas
import from_npm
import hook
import markdown
import pytest
from mkdocs.exceptions import PluginError

PAGE = r"""# Title

A ring sends \(2(p-1)n/p\) bytes, and \(a_b + c_d\) *is* one, too; `\(code\)` is none.

- in a list: \(\alpha < \beta\)

| what | cost |
|---|---|
| tree | \(2 \lg p\) |

```math
\begin{aligned}
T &= \alpha + \beta n \\
  &< 2
\end{aligned}
```

??? note "A fold"
    ```math
    x^2
    ```

```text
\(not here\)
```
"""


def made(text):
    config = SimpleNamespace(mdx_configs={}, markdown_extensions=["tables", "pymdownx.superfences", "pymdownx.details"])
    config.extra_css = []
    hook.on_config(config)
    return markdown.markdown(text, extensions=config.markdown_extensions, extension_configs=config.mdx_configs)


def tex_of(html):
    return [formulas._formula(found) for found in formulas._MADE.finditer(html)]


def test_what_is_a_formula_and_what_is_code():
    html = made(PAGE)
    assert tex_of(html) == [
        (r"2(p-1)n/p", False),
        (r"a_b + c_d", False),
        (r"\alpha < \beta", False),
        (r"2 \lg p", False),
        ("\\begin{aligned}\nT &= \\alpha + \\beta n \\\\\n  &< 2\n\\end{aligned}", True),
        ("x^2", True),
    ]
    assert r"<code>\(code\)</code>" in html
    assert r"\(not here\)" in html


def test_without_katex_readers_see_the_tex_in_the_letters_of_code(monkeypatch, tmp_path):
    monkeypatch.setattr(from_npm, "FETCHED", tmp_path / "nothing")
    monkeypatch.setattr(formulas, "_known", {})
    html = made(r"A ring: \(x < y\)")
    formulas.typeset([html])
    shown = '<var class="formula" data-search-exclude=""><code class="tex">x &lt; y</code></var>'
    assert shown in formulas.with_formulas(html)
    formulas.add_parts(tmp_path / "site")
    assert not (tmp_path / "site").exists()


@pytest.fixture
def katex(monkeypatch):
    if trouble := from_npm.fetch():
        pytest.skip(f"no KaTeX here: {trouble}; `make docs` fetches it with npm")
    if formulas.missing():
        pytest.skip("no node to run KaTeX with; `apt-get install nodejs npm` enables this test")
    monkeypatch.setattr(formulas, "_known", {})


@pytest.mark.usefixtures("katex")
def test_katex_makes_html_and_mathml_of_all_pages_in_one_run(monkeypatch):
    pages, runs, run = [made(PAGE), made(r"\(x\) and \(x\)")], [], formulas.subprocess.run
    monkeypatch.setattr(formulas.subprocess, "run", lambda *given, **named: runs.append(named) or run(*given, **named))
    formulas.typeset(pages)
    formulas.typeset(pages)  # all are known now
    assert [len(json.loads(one["input"])) for one in runs] == [7]
    first, second = map(formulas.with_formulas, pages)
    assert first.count("<math ") == 6
    assert first.count('class="katex-display"') == 2
    assert second.count("<math ") == 2
    assert "<script" not in first


@pytest.mark.usefixtures("katex")
@pytest.mark.parametrize(
    ("text", "line"), [("# Title\n\nWords,\nand \\(\\frac{1\\).\n", 4), ("# Title\n\n```math\n\\nothing\n```\n", 4)]
)
def test_what_katex_refuses_ends_the_build_with_its_line(text, line, tmp_path):
    file = tmp_path / "try_me.md"
    file.write_text(text)
    page = SimpleNamespace(content=made(text), file=SimpleNamespace(abs_src_path=str(file)))
    files = SimpleNamespace(documentation_pages=lambda: [SimpleNamespace(page=page)])
    with pytest.raises(PluginError, match=rf"try_me\.md:{line}: a formula that KaTeX refuses: "):
        hook.on_env(None, files=files)


def test_an_empty_formula_is_refused():
    with pytest.raises(ValueError, match="empty"):
        formulas.display("  ")


@pytest.mark.usefixtures("katex")
def test_the_style_names_the_fonts_that_are_beside_it(tmp_path):
    formulas.add_parts(tmp_path)
    style = tmp_path / formulas.STYLE
    named = re.findall(r"url\(([^)]+)\)", style.read_text())
    assert len(named) > 10
    assert all((style.parent / name).is_file() for name in named)


def test_search_does_not_find_the_parts_of_a_formula(site):
    text = (site / "search" / "search_index.json").read_text()
    assert "telescope" in text
    assert "residual . It sends ," in text
    assert "begin{" not in text
