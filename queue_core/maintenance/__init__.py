"""The services that keep the tables in order: each has its file, and a `run_once` that says what it did."""
