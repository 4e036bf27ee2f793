"""The search for plans of decode linears: what is tried, how it is timed, what is kept."""
