def write_report(a, p): p.write_text("x")
