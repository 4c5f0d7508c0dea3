"""Train recommendation models whose embedding tables outgrow the memory next to the compute."""
