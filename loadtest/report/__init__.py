"""Writes report.html: tables and Vega-Lite charts in one file that needs no network."""
