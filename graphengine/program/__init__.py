"""The captured programs: the steps of a replay, the static fields they see, and the keys of
graphs.
"""
