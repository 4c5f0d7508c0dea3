"""What do the columns of unknown files hold, and which schema fits them?

`hotbed init` and `hotbed inspect` share the column profile.
"""
