"""What a rank owns of every trained parameter, and the optimizer states with it, whatever the engine."""
