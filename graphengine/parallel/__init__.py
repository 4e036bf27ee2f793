"""Several ranks: processes that decode together, one per device."""
