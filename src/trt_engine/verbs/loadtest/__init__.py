"""Load on a server or an engine: arrivals, clients, the search for the highest rate."""
