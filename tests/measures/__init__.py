"""How much of the code a reader must read: `python -m tests.measures` (docs/design.md).

tree       the product's files, and what each imports
closure    the files that a door imports
smear      the files outside an optional feature's home that name it
trace      the functions that run for a request, and the statements in them
option     the functions that hold an option, from serving.properties on
requests   one streamed request through the front end, and one through the engine
"""
