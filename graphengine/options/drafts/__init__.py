"""Options of drafters: what each may do, schedules, trees, vocabularies."""
