"""The search for plans of decode linears: candidates, timing, and the choice."""
