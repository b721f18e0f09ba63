package checkup

// This file judges what agents and verifiers may be told by others than the server.

// judgeTaint looks at an authority whose key others may know. What has ended does no harm.
func (s *State) judgeTaint(c *Certificate) []Finding {
	if c.Tainted == nil || s.Time.After(c.NotAfter) {
		return nil
	}
	does := "and leaves are accepted that it signed, as long as its root is trusted"
	switch {
	case c.Kind == KindRoot && c.InUse:
		does = "and is still trusted, and the issuer in use is under it"
	case c.Kind == KindRoot:
		does = "and is still trusted"
	case c.InUse:
		does = "and still signs"
	}
	return []Finding{Found("authority.tainted", Critical, c.Name(), "has been tainted since %s, %s", stamp(*c.Tainted), does)}
}

// judgeBundleKey looks at the key that signs bundles.
func (s *State) judgeBundleKey() []Finding {
	switch d := s.Document; {
	case d == nil:
		return nil
	case d.BundleKeyError != "":
		return []Finding{Found("bundle-key.unusable", Critical, "bundle key "+d.BundleKey, "cannot be used: %s", d.BundleKeyError)}
	case d.BundleKey == "" && s.Running && !s.young():
		return []Finding{Found("bundle-key.missing", Warning, "trust domain "+s.TrustDomain, "has no bundle key")}
	}
	return nil
}
