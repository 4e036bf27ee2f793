"""Products of prefill: any number of lanes, all of which are computed."""
