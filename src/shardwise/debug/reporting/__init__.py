"""The report: one page, in one file, about how a model is sharded and what a step of it communicates.

report          the public `report`, and the `Report` that it returns
step            runs the step: what it communicates, and the modules that it calls
holders         the parameters and buffers, and the bytes that each rank holds of them
findings        the warnings; `folded` joins collectives that are alike
sections        the sections of the page: overview, placements, parameters, communication, timeline, explanations
tables          tables that sort and filter
page            the page, from page.html, page.css and page.js
"""
