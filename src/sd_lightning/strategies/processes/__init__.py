"""Process group setup and teardown, and the watchdog that ends a run when a rank dies or hangs."""
