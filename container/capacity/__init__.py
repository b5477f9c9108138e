"""`longshore plan`: estimates GPU memory. Imports no other folder of `container`."""
