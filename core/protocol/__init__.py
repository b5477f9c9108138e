"""The messages between the front end and the engine, and the numbers that they carry."""
