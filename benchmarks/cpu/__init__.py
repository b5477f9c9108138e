"""Our server on a CPU against others: same model, same requests, each alone on the machine."""
