class AutoStrategy:
    pass
