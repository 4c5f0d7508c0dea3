"""How do servers score requests with models that training exported and keeps publishing?"""
