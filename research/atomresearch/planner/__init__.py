"""A plainer search for plans, and how far it is from the planner's."""
