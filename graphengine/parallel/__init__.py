"""Several ranks: processes that decode together, one a device."""
