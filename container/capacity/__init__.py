"""`container plan`: what a model needs of an instance's GPUs. Imports no other room."""
