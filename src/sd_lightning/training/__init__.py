"""The Lightning module and what it computes with: precision, speed switches, learning-rate schedules."""
