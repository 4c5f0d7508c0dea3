"""How are data, runs, plans and skew shown as tables on a console and as HTML pages?"""
