"""The choice of a launch plan for each linear, and chains of linears to measure plans with."""
