"""`deploy`: configurations of serving systems for engines. Targets: `targets.TARGETS`."""
