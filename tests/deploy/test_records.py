def test_x(database):
    from homebody.deploy.records import Records

    r = Records(database)
    r.ledger()
    print(r.add_device("a", b"k", "n", 3), r.devices())
    print(r.add_items([("a", "b"), ("a", "c"), ("d", "e")]), r.items(1), r.counters(), database.name)
