"""A whole package for a new backend, to begin from: it trains, and passes the suite, as it is written."""
