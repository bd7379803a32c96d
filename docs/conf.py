"""The documentation site: `make docs`.

Its source is the whole checkout, so that a relative link leads to the same page here and in a code browser. A link to a
file that is not a page becomes a download.
"""

project = "Anabranch"
copyright = "The Anabranch developers. Licence: Apache-2.0"  # noqa: A001  # Sphinx reads this name
extensions = ["myst_parser"]

root_doc = "docs/index"
include_patterns = [
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/*.md"),
    *("contracts/**/*.md", "k8s/*.md", "k8s/**/*.md", "benchmarks/*.md", "streams/sample/README.md"),
]
exclude_patterns = [".*", "build", "dist"]
myst_heading_anchors = 4  # made as GitHub makes them

html_theme = "furo"
html_title = "Anabranch documentation"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["root"]  # sends readers of the site's root to its first page
html_copy_source = False
html_use_index = False
