"""Which launch plan each linear gets, and chains of linears to measure plans with."""
