"""What a backend must do right, or refuse: each case a function that runs on the ranks under any strategy."""
