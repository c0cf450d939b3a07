"""The processes of a run: how they part, and what ends them when one dies or hangs."""
