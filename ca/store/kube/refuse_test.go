package kube

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	coordination "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/chancery-project/chancery/ca/store"
)

func gz(t *testing.T, data []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	if _, err := z.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// Each way in which the document's Secret can differ from what was written is named.
func TestDocumentsThatAreRefused(t *testing.T) {
	data, err := pack(9, []byte("nine"))
	if err != nil {
		t.Fatal(err)
	}
	good := &corev1.Secret{Type: documentType, Data: data}
	if d, err := unpack(good); err != nil || string(d.data) != "nine" || d.version != 9 {
		t.Fatalf("%+v, %v", d, err)
	}
	yes := true
	for name, tc := range map[string]struct {
		change func(*corev1.Secret)
		want   string
	}{
		"of another type":      {func(x *corev1.Secret) { x.Type = corev1.SecretTypeOpaque }, `type "Opaque"`},
		"of a later layout":    {func(x *corev1.Secret) { x.Type = "chancery/state-v2" }, `type "chancery/state-v2"`},
		"notes":                {func(x *corev1.Secret) { x.Type = notesType }, "one of ours has chancery/state-v1"},
		"immutable":            {func(x *corev1.Secret) { x.Immutable = &yes }, "immutable"},
		"empty":                {func(x *corev1.Secret) { x.Data = nil }, "there is no document in it"},
		"with more data":       {func(x *corev1.Secret) { x.Data["colour"] = []byte("red") }, "4 fields"},
		"without version":      {func(x *corev1.Secret) { delete(x.Data, versionField) }, "2 fields"},
		"of other fields":      {func(x *corev1.Secret) { delete(x.Data, changeField); x.Data["colour"] = nil }, "three, version"},
		"version 0":            {func(x *corev1.Secret) { x.Data[versionField] = []byte("0") }, `"0"; it should be a number`},
		"version -1":           {func(x *corev1.Secret) { x.Data[versionField] = []byte("-1") }, "it should be a number"},
		"version +9":           {func(x *corev1.Secret) { x.Data[versionField] = []byte("+9") }, "it should be a number"},
		"version 09":           {func(x *corev1.Secret) { x.Data[versionField] = []byte("09") }, "it should be a number"},
		"version with newline": {func(x *corev1.Secret) { x.Data[versionField] = []byte("9\n") }, "it should be a number"},
		"version too high":     {func(x *corev1.Secret) { x.Data[versionField] = []byte("4611686018427387905") }, "it should be a number"},
		"version of megabytes": {func(x *corev1.Secret) { x.Data[versionField] = bytes.Repeat([]byte("9"), 1<<20) }, "it should be a number"},
		"no gzip":              {func(x *corev1.Secret) { x.Data[documentField] = []byte("{}") }, "unpacking"},
		"cut off":              {func(x *corev1.Secret) { x.Data[documentField] = x.Data[documentField][:15] }, "unpacking"},
		"a bit changed":        {func(x *corev1.Secret) { x.Data[documentField][len(x.Data[documentField])-6] ^= 1 }, "unpacking"},
		"more after it":        {func(x *corev1.Secret) { x.Data[documentField] = append(x.Data[documentField], 0) }, "1 bytes follow"},
		"two of them":          {func(x *corev1.Secret) { x.Data[documentField] = append(x.Data[documentField], gz(t, []byte("x"))...) }, "bytes follow"},
		"too large":            {func(x *corev1.Secret) { x.Data[documentField] = make([]byte, corev1.MaxSecretSize+1) }, "at most 1048576 are read"},
		"a bomb":               {func(x *corev1.Secret) { x.Data[documentField] = gz(t, make([]byte, 500<<20)) }, "more than 16777216 bytes after unpacking"},
	} {
		t.Run(name, func(t *testing.T) {
			changed := good.DeepCopy()
			tc.change(changed)
			d, err := unpack(changed)
			if err == nil || !strings.Contains(err.Error(), tc.want) || len(err.Error()) > 400 {
				t.Errorf("got %.500v, want %s", err, tc.want)
			}
			if d.data != nil || d.version != 0 {
				t.Errorf("and yet a document: %.40q, %d", d.data, d.version)
			}
		})
	}
}

// A bomb is not unpacked: what is read of it stays near the bound.
func TestBombIsNotUnpacked(t *testing.T) {
	bomb := gz(t, make([]byte, 500<<20))
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if _, err := gunzip(bomb); err == nil {
		t.Error("accepted")
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 8*store.MaxDocument {
		t.Errorf("%d bytes were allocated for it", n)
	}
}

func TestNotesThatAreRefused(t *testing.T) {
	many := map[string][]byte{}
	for i := range store.MaxNotes + 1 {
		many[fmt.Sprint("replica-", i)] = nil
	}
	for name, tc := range map[string]struct {
		secret corev1.Secret
		want   string
	}{
		"of another type": {corev1.Secret{Type: documentType}, "one of ours has chancery/notes-v1"},
		"of no replica":   {corev1.Secret{Type: notesType, Data: map[string][]byte{"README.md": nil}}, `field "README.md"`},
		"too many":        {corev1.Secret{Type: notesType, Data: many}, "more than 256 notes"},
		"too large":       {corev1.Secret{Type: notesType, Data: map[string][]byte{"a": make([]byte, store.MaxNote+1)}}, "1048577 bytes"},
	} {
		if all, err := readNotes(&tc.secret); err == nil || !strings.Contains(err.Error(), tc.want) || all != nil {
			t.Errorf("%s: %v, want %s", name, err, tc.want)
		}
	}
}

func leaseOf(holder string, seconds, changes int32, renewed time.Time) record {
	at := metav1.NewMicroTime(renewed)
	return recordOf(&coordination.Lease{Spec: coordination.LeaseSpec{
		HolderIdentity: &holder, LeaseDurationSeconds: &seconds, LeaseTransitions: &changes, AcquireTime: &at, RenewTime: &at,
	}})
}

// TestLeaseByObservation: a lease is over when it was seen unchanged for its life, whatever the holder's clock says, and whatever
// life somebody wrote into it.
func TestLeaseByObservation(t *testing.T) {
	for name, tc := range map[string]struct {
		seconds int32
		life    time.Duration
	}{
		"as written":   {15, 15 * time.Second},
		"for ever":     {math.MaxInt32, time.Minute},
		"for no time":  {0, time.Second},
		"for negative": {-5, time.Second},
	} {
		for _, clock := range []time.Duration{0, -24 * time.Hour, 24 * time.Hour, 290 * 365 * 24 * time.Hour} {
			synctest.Test(t, func(t *testing.T) {
				s := &Store{}
				held := leaseOf("other", tc.seconds, 1, time.Now().Add(clock))
				over := func(want bool, when string) {
					t.Helper()
					if s.over(held) != want {
						t.Errorf("%s, holder's clock at %s, %s: over is %v", name, clock, when, !want)
					}
				}
				over(false, "seen first")
				time.Sleep(tc.life)
				over(false, "at its end")
				held = leaseOf("other", tc.seconds, 1, held.renewed.Add(time.Second))
				over(false, "renewed")
				time.Sleep(tc.life)
				over(false, "at its end once more")
				time.Sleep(time.Millisecond)
				over(true, "after its end")
				held = leaseOf("third", tc.seconds, 2, held.renewed)
				over(false, "taken by a third")
			})
		}
	}
}

func TestHoldersNamesAreBounded(t *testing.T) {
	if r := leaseOf(strings.Repeat("a", 1<<20), 1, 1, time.Now()); len(r.holder) > store.MaxName {
		t.Errorf("a holder of %d bytes", len(r.holder))
	}
	if r := leaseOf(strings.Repeat("a", store.MaxName-1)+"ä", 1, 1, time.Now()); !strings.HasSuffix(r.holder, "?") {
		t.Errorf("a letter is cut in half: %q", r.holder)
	}
	if r := recordOf(&coordination.Lease{}); r != (record{}) {
		t.Errorf("an empty lease: %+v", r)
	}
}

func TestConfig(t *testing.T) {
	good := Config{Namespace: "chancery", Kubeconfig: "/k"}
	for name, tc := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"good":         {func(*Config) {}, ""},
		"in cluster":   {func(c *Config) { c.Kubeconfig, c.InCluster = "", true }, ""},
		"named":        {func(c *Config) { c.Name = "prod.state-1" }, ""},
		"long":         {func(c *Config) { c.Name = strings.Repeat("a", 240) }, ""},
		"no namespace": {func(c *Config) { c.Namespace = "" }, "namespace:"},
		"a path":       {func(c *Config) { c.Namespace = "a/b" }, "namespace:"},
		"no name":      {func(c *Config) { c.Name = "../x" }, "name:"},
		"upper case":   {func(c *Config) { c.Name = "State" }, "name:"},
		"two dots":     {func(c *Config) { c.Name = "a..b" }, "name:"},
		"too long":     {func(c *Config) { c.Name = strings.Repeat("a", 241) }, "name:"},
		"nothing":      {func(c *Config) { c.Kubeconfig = "" }, "neither kubeconfig nor inCluster"},
		"both":         {func(c *Config) { c.InCluster = true }, "both set"},
	} {
		c := good
		tc.change(&c)
		err := c.Check()
		if (err == nil) != (tc.want == "") || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%s: %v, want %q", name, err, tc.want)
		}
	}
}
