"""report.html: what was found, drawn with Vega-Lite, in one file that needs no network."""
