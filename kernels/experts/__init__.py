"""Mixtures of experts: the router, pairs of lane and expert, and the experts' two products."""
