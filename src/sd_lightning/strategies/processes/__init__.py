"""The processes of a run: how they come together and part, and what ends them when one dies or hangs."""
