package https

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// A redirect would carry the credential to another host.
func TestRedirectIsRefused(t *testing.T) {
	var followed bool
	elsewhere := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { followed = true }))
	defer elsewhere.Close()
	s := httptest.NewServer(http.RedirectHandler(elsewhere.URL, http.StatusTemporaryRedirect))
	defer s.Close()
	e, err := New(s.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	err = e.Post(t.Context(), Call{Path: "v1/x", Header: map[string]string{"X-Vault-Token": "t"}, In: 1}, nil)
	if err == nil || !strings.Contains(err.Error(), "it redirects to") || followed {
		t.Errorf("got %v, followed %v", err, followed)
	}
}

// A proxy of the environment is not used: it would be told where the CA is.
func TestProxyIsNotUsed(t *testing.T) {
	t.Setenv("HTTP_PROXY", "http://127.0.0.1:1")
	t.Setenv("NO_PROXY", "none.invalid")
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { w.Write([]byte(`{"a": 1, "b": 2}`)) }))
	defer s.Close()
	e, err := New(s.URL, "")
	if err != nil {
		t.Fatal(err)
	}
	var out struct{ A int }
	if err := e.Post(t.Context(), Call{}, &out); err != nil || out.A != 1 {
		t.Error(out, err)
	}
}

func TestStatusKeepsItsBody(t *testing.T) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { http.Error(w, "why", http.StatusTeapot) }))
	defer s.Close()
	e, err := New(s.URL+"/base", "")
	if err != nil {
		t.Fatal(err)
	}
	err = e.Post(t.Context(), Call{Path: "v1"}, nil)
	if status, ok := errors.AsType[*StatusError](err); !ok || status.Status != http.StatusTeapot || string(status.Body) != "why\n" {
		t.Errorf("got %v", err)
	}
}

func TestClean(t *testing.T) {
	for in, want := range map[string]string{
		"a\nb\x1b[31m\tc":        "a b [31m c",
		"token s3cret, s3cret":   "token [secret], [secret]",
		"bad \xff utf8":          "bad ? utf8",
		strings.Repeat("x", 999): strings.Repeat("x", maxText) + "...",
	} {
		if got := Clean(in, "s3cret", ""); got != want {
			t.Errorf("%q became %q", in, got)
		}
	}
}
