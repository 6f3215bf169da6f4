"""The databases that a queue can live in. Only `queue_core.connect` names these modules."""
