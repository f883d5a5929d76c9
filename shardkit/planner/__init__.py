"""What a strategy would hold in memory, and what batch fits, known before anything is allocated."""
