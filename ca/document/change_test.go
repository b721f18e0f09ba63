package document

import (
	"encoding/json"
	"reflect"
	"testing"
	"time"
)

// fill sets all that can be set, so that a field which Clone forgets shows.
func fill(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem())
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		for i := range 2 {
			fill(v.Index(i))
		}
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		one := reflect.New(v.Type().Elem()).Elem()
		fill(one)
		v.SetMapIndex(reflect.ValueOf("td"), one)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Date(2026, 12, 1, 0, 0, 0, 0, time.UTC)))
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i))
		}
	case reflect.String:
		v.SetString("x")
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8, reflect.Uint32, reflect.Uint64:
		v.SetUint(7)
	case reflect.Int:
		v.SetInt(7)
	}
}

// shares returns the path of a place that two values share and that can change.
func shares(a, b reflect.Value, path string) string {
	switch a.Kind() {
	case reflect.Pointer:
		if !a.IsNil() && a.Pointer() == b.Pointer() {
			return path
		}
		if !a.IsNil() {
			return shares(a.Elem(), b.Elem(), path)
		}
	case reflect.Slice:
		if a.Type().Elem().Kind() == reflect.Uint8 {
			return "" // bytes are replaced, never changed
		}
		if a.Len() > 0 && a.Pointer() == b.Pointer() {
			return path
		}
		for i := range a.Len() {
			if p := shares(a.Index(i), b.Index(i), path+"[]"); p != "" {
				return p
			}
		}
	case reflect.Map:
		if a.Len() > 0 && a.Pointer() == b.Pointer() {
			return path
		}
		for _, k := range a.MapKeys() {
			if p := shares(a.MapIndex(k), b.MapIndex(k), path+"[]"); p != "" {
				return p
			}
		}
	case reflect.Struct:
		if a.Type() == reflect.TypeFor[time.Time]() {
			return ""
		}
		for i := range a.NumField() {
			if p := shares(a.Field(i), b.Field(i), path+"."+a.Type().Field(i).Name); p != "" {
				return p
			}
		}
	}
	return ""
}

// TestCloneIsACopy: as good as by way of JSON, and it shares nothing that changes.
func TestCloneIsACopy(t *testing.T) {
	d := new(Document)
	fill(reflect.ValueOf(d).Elem())
	for _, doc := range []*Document{d, New(), {}, {Domains: map[string]*DomainState{"td": nil}}} {
		c := doc.Clone()
		if a, b := must(json.Marshal(doc)), must(json.Marshal(c)); string(a) != string(b) || !reflect.DeepEqual(doc, c) {
			t.Errorf("%s\nbecame\n%s", a, b)
		}
		if p := shares(reflect.ValueOf(doc), reflect.ValueOf(c), "document"); p != "" {
			t.Errorf("the copy shares %s", p)
		}
	}
}

// TestARotationIsTakenIntoTheNextEpoch: what was acknowledged before a restore was another document's.
func TestARotationIsTakenIntoTheNextEpoch(t *testing.T) {
	d, now := New(), time.Now()
	s := d.State(td)
	s.Generation = 2
	s.Rotation = &Rotation{Phase: PhaseDistribute, Version: 1, Generation: 2, Since: now.Add(-time.Hour), Spread: now.Add(-time.Hour),
		Overrides: []Override{{Gate: "consumers", Phase: PhaseDistribute, Time: now.Add(-time.Minute)}}}
	n := must(d.ReissueBy(900, Import{Actor: "a", Time: now}))
	r := n.Rotating(td)
	if r.Version != n.Version || r.Generation != n.State(td).Generation || r.Generation < 1<<16 || r.Since.Before(now) || !r.Spread.IsZero() {
		t.Errorf("%+v in version %d", r, n.Version)
	}
	if !r.Overrides[0].Time.Before(r.Since) {
		t.Error("an admin's word for the former document stands")
	}
}

// TestRootsLeaveWithTheirIssuers: an issuer under a root that is dropped disappears, of whatever state, and the generation grows.
func TestRootsLeaveWithTheirIssuers(t *testing.T) {
	d, now := New(), time.Now()
	s := d.State(td)
	s.Authorities = []Authority{
		{ID: "R1", Kind: KindRoot, State: StateActive}, {ID: "I1", Kind: KindIssuer, State: StateActive, Root: "R1"},
		{ID: "I0", Kind: KindIssuer, State: StateRetiring, Root: "R1"}, {ID: "R2", Kind: KindRoot, State: StatePrepared},
		{ID: "I2", Kind: KindIssuer, State: StatePrepared, Root: "R2"}, {ID: "I9", Kind: KindIssuer, State: StateRetiring, Root: "R9"},
	}
	if !s.Activate(KindRoot, "R2", now) || !s.Activate(KindIssuer, "I2", now) || s.Activate(KindIssuer, "I3", now) {
		t.Fatal("not activated")
	}
	if a := s.Get(KindIssuer, "I1"); a.State != StateRetiring || a.Retired == nil {
		t.Errorf("%+v", a)
	}
	s.DropRoot("R1")
	var left []string
	for _, a := range s.Authorities {
		left = append(left, a.ID)
	}
	if !reflect.DeepEqual(left, []string{"R2", "I2", "I9"}) || s.Generation != 1 {
		t.Errorf("%v, generation %d", left, s.Generation)
	}
	s.Taint(KindIssuer, "I9", now)
	if s.Activate(KindIssuer, "I9", now) {
		t.Error("a tainted issuer was activated")
	}
	if a := s.Get(KindIssuer, "I2"); a.State != StateActive {
		t.Errorf("a refusal changed %+v", a)
	}
}
