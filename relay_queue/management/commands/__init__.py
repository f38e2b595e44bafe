"""``runworker`` runs jobs; ``relay`` looks at the queue and operates it."""
