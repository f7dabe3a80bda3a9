"""Games and data sets of other packages as environments."""
