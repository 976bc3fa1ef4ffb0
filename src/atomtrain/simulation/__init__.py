"""Networks and swarms that are not there: event-driven models of the two ways of working."""
