"""What each program does, callable without Hydra's command line."""
