"""The Lightning module, and its precision, speed options, parameter groups and learning-rate schedules."""
