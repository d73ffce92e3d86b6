"""Cells of a study to tables and figures: `cells` checks, `tables` builds and writes, `plots` draws."""
